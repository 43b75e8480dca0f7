"""DDP8xx: evaluation, and what is computed from gathered results."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP801 padded-evaluation: warning
A metric counts samples twice that a sampler gave to two ranks.
why: DistributedSampler gives every rank the same number of samples: if the world size does not divide the dataset, it
repeats some. In training that hardly matters; a metric over all ranks counts them twice, and changes with the number of
ranks. (PyTorch docs, DistributedSampler, drop_last.)
fix: Cut gathered results to the length of the dataset, evaluate with a sampler that repeats nothing
(indices[rank::world_size]), or evaluate on one rank with the inner module.
detected: `ddpcheck run` compares the indices that the ranks' loaders give in a pass without backward. It is reported if
some of them are repeated, and one of these holds: a collective is given the number of all samples of a rank (a counter,
or the sum of a confusion matrix; fewer than 256 only together with the numbers that the loop has counted) or a mean
over them, or a printed, logged or saved number is a metric over all gathered rows. A sum that is divided by the length
of the dataset, and results that go to files or other processes, are not covered.
ignore: If the dataset is large, and the metric only has to be roughly right.
example:
correct, total = evaluate(ddp, DataLoader(data, sampler=DistributedSampler(data)))
counts = torch.tensor([correct, total])  # right: of a loader over Subset(data, range(rank, len(data), world_size))
dist.all_reduce(counts)

DDP802 own-shard-metric: warning
One rank shows a metric of its shard, or decides by it, as if it covered all samples.
why: Each rank evaluates 1/W of the data. A metric that rank 0 prints, logs or selects the best checkpoint by is a noisy
estimate, and changes with the number of ranks. DDP reduces gradients and nothing else.
fix: all_reduce the sum and the count over the ranks, then divide; or evaluate all of the data on one rank.
detected: `ddpcheck run` reads the variables of the script's functions when a pass over a loader without backward ends:
counters (also a few in one tensor or list), sums, meters, square tables of counts, and lists of one number or label per
sample. It is reported if some ranks, not all, print, log or save a metric computed from these for their own samples, or
save a file under an `if` with it, and the metric has a different value on the other ranks and over all ranks together.
Known metrics are a mean over samples, batches or tokens, and its error rate, root and exponential; accuracy, IoU, F1,
precision and recall of a table; areas under curves, and other metrics of two lists. It is reported even if a copy is
all_reduced, as long as the number is the rank's own. To rule out coincidence, the numbers of all evaluations by a loop
have to match the metric and carry at least 6.5 bits: the integer 91 does, 0.5 does not. A metric is also reported if
one rank alone evaluates a loader whose DistributedSampler splits the data between several. Covered are print, logging,
torch.save, broadcasts from a rank, and the first three passes over a loader. A loop without a DataLoader is not
covered. A schedule that is given such a metric is DDP518.
ignore: If the number is intended as that of one rank, and is labelled so.
reports: Lightning-AI/pytorch-lightning#379
example:
accuracy = correct / total               # right: dist.all_reduce of correct and total first
if rank == 0:
    print(f"accuracy {accuracy:.4f}")

DDP803 order-of-gathered-results: warning
Results are gathered rank by rank, and compared with labels in the order of the dataset.
why: DistributedSampler gives rank r the samples r, r + W, r + 2W and so on. all_gather returns all of rank 0 first,
then all of rank 1: each result is compared with another sample's label, and the metric is no better than a guess.
fix: Gather the labels or the indices with the results, or put the results back in order: torch.stack(gathered,
1).flatten(0, 1)[:len(dataset)].
detected: `ddpcheck run` keeps the results that ranks give to a gather in a pass without backward or after it, as
numbers or classes (of scores the highest, or whether there is one), and the labels or numbers that the loader gives
with the samples or that the dataset holds. It is reported if a printed, logged or saved number is the agreement of the
two in their given order (the share of equal labels, a mean error, a correlation and others of that kind), and the
agreement differs when each sample is compared with its own label. It is also reported if, after the gather, the script
itself compares two such tensors in their given order, scaled or not, in a difference, a comparison or a loss of torch.
In other computations, results that were rounded to fewer than three digits are not covered.
ignore: Never: the metric is not that of the model.
example:
dist.all_gather(parts, predictions)      # of a loader with a DistributedSampler
accuracy = (torch.cat(parts) == dataset.labels).float().mean()  # right: gather the labels too

DDP804 targets-without-offset: error
Targets index rows gathered from all ranks, without the offset of the rank's own rows.
why: In the result of all_gather, the rows of rank r begin at r * batch size. With targets arange(batch size) on every
rank, all ranks except the first learn to match their samples with those of rank 0.
fix: Add the offset: targets = torch.arange(len(x)) + rank * len(x).
detected: `ddpcheck run` checks, in some of the steps, cross entropies over products with a gathered matrix, cosine
similarities and torch.cdist. It finds the rank's own rows in the matrix. It is reported if the ranks have these rows at
different places and the same targets, or as many in a row, and on some ranks no target is one of these rows. Losses
other than cross entropy, differences of rows that are written out, and rows that pass through a layer after they were
gathered, are not covered.
ignore: If the positives of a rank are rows of another rank on purpose.
example:
logits = features @ torch.cat(all_gather(features)).T
loss = cross_entropy(logits, torch.arange(len(features)))  # right: + rank * len(features)

DDP805 mean-of-ranks-means: warning
A metric is the mean of the ranks' metrics, which differs from the metric over all samples.
why: Each rank's mean has the same weight, however many samples the rank has. A metric that is not a mean over samples
(an area under a curve, F1, IoU) differs on a part of the data. A sum divided by the size of the whole dataset should be
added up over ranks: the mean is too small by a factor of the world size. So the metric changes with the number of
ranks.
fix: all_reduce the sum and the count over the ranks, then divide; for a metric that is not a mean, gather the scores
and labels.
detected: `ddpcheck run` checks the values that ranks give to collectives after a pass over a loader without backward.
It is reported if such a value is, on each rank, a metric of the samples that the rank has counted (the metrics of
DDP802), and a printed, logged or saved number is the mean or the sum of these and differs by more than 1 % from the
metric over all samples. Metrics of lists are known up to 2,048 samples a rank. A number that only a schedule is given
is not covered.
ignore: If each rank has a different kind of data, and each kind should have the same weight.
example:
loss = torch.tensor(total / len(own))    # right: all_reduce of total and len(own), then divide
dist.all_reduce(loss)
print(loss.item() / world_size)

DDP806 sum-reduced-again: warning
A running sum is all_reduced after each batch, and the reduced sum is used in the next one.
why: all_reduce leaves the sum of all ranks on each rank. If a rank adds to this sum and reduces it again, the sums of
earlier batches are multiplied by the number of ranks with each batch: the first batches have almost all of the weight.
fix: Reduce once, after the loop; or reduce the part since the last time, and add that to the total.
detected: `ddpcheck run` checks all_reduce of up to eight numbers, the first 64 times at a line. It is reported if, four
times in turn, each rank gives the result of the previous call plus about as much again, so that it grows by the number
of ranks.
ignore: If the number grows this way on purpose.
example:
for x, y in batches:
    total += loss(ddp(x), y).detach()
    dist.all_reduce(total)               # right: after the loop
""")
