"""DDP8xx: evaluation, and what is computed from gathered results."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP801 padded-evaluation: warning
A metric counts samples twice that a sampler has given to two ranks.
why: DistributedSampler gives every rank as many samples: where the world size does not divide the dataset, it repeats
some. In training that hardly matters; a metric over all ranks counts them twice, and changes with the number of ranks.
(PyTorch docs, DistributedSampler, drop_last.)
fix: Cut gathered results to the length of the dataset, evaluate with a sampler that repeats nothing
(indices[rank::world_size]), or evaluate on one rank with the module that is wrapped.
detected: `ddpcheck run` compares the indices that the ranks' loaders give in a pass without backward. It is reported
if some are there more often than others, and a collective is given the number of all samples of a rank (a counter, the
sum of a confusion matrix; fewer than 256 only beside what the loop has counted) or a mean over them, or if a number
that is printed, logged or saved is one over all gathered rows. A sum that is divided by the length of the dataset, and
results that go to files or other processes, are not seen.
ignore: If the dataset is large, and the metric only has to be roughly right.
example:
correct, total = evaluate(ddp, DataLoader(data, sampler=DistributedSampler(data)))
counts = torch.tensor([correct, total])  # right: of a loader over Subset(data, range(rank, len(data), world_size))
dist.all_reduce(counts)

DDP802 own-shard-metric: warning
One rank shows a metric of its own shard, or decides by it, as if it were of all samples.
why: Each rank evaluates 1/W of the data. What rank 0 prints, logs or keeps the best checkpoint by is a noisy estimate,
and another one with each number of ranks. DDP reduces gradients and nothing else.
fix: all_reduce the sum and the count over the ranks, then divide; or evaluate all of the data on one rank.
detected: `ddpcheck run` looks at what the script's functions hold when a pass over a loader without backward ends:
counters (a few in one tensor or list, too), sums, meters, square tables of counts, and lists of a number or a label for
each sample. It is reported if some ranks, not all, print, log or save a metric of these on their own samples, or save a
file under an `if` with it, and the other ranks and all together have another value. Known are a mean over samples,
batches or tokens, its error rate, root and exponential; accuracy, IoU, F1, precision and recall of a table; areas under
curves, and other metrics of two lists. An all_reduced copy is no excuse if the number is that of the rank.
The numbers of all evaluations by a loop have to be the metric, and carry at least 6.5 bits against a coincidence: 91 is
such an integer, and 0.5 no such number. So is what one rank shows that alone goes through a loader whose
DistributedSampler splits the data between several. Seen are print, logging, torch.save, broadcasts from a rank, and the
first three passes over a loader. A loop without a DataLoader is not. A schedule that is given such a metric is DDP518.
ignore: If the number is meant as that of one rank, and says so.
reports: Lightning-AI/pytorch-lightning#379
example:
accuracy = correct / total               # right: dist.all_reduce of correct and total first
if rank == 0:
    print(f"accuracy {accuracy:.4f}")

DDP803 order-of-gathered-results: warning
Results are gathered rank by rank, and compared with labels in the order of the dataset.
why: DistributedSampler gives rank r the samples r, r + W, r + 2W and so on. all_gather returns all of rank 0 first,
then all of rank 1: each result stands at the place of another sample, and the metric is that of a guess.
fix: Gather the labels or the indices with the results, or put the results back in order: torch.stack(gathered,
1).flatten(0, 1)[:len(dataset)].
detected: `ddpcheck run` keeps the classes that ranks give to a gather in a pass without backward or after it (of scores
the highest, or whether there is one) or the numbers, and the labels or numbers that the loader gives with the samples
or that the dataset holds. It is reported where a number that is printed, logged or saved is the agreement of the two as
they stand (the share of equal labels, a mean error, a correlation and others of that kind), and another one where each
sample is compared with its own label. So it is where the script itself compares two tensors that are these, as they
stand or scaled, in a difference, a comparison or a loss of torch's after the gather. Of what is computed otherwise,
results that were rounded to fewer than three digits are not seen.
ignore: Never: the metric is not that of the model.
example:
dist.all_gather(parts, predictions)      # of a loader with a DistributedSampler
accuracy = (torch.cat(parts) == dataset.labels).float().mean()  # right: gather the labels too

DDP804 targets-without-offset: error
Targets index rows that were gathered from all ranks, without the offset of the rank's own.
why: The rows of rank r begin at r * batch size in what all_gather returns. With targets arange(batch size) on every
rank, all ranks but the first learn to match their samples with those of rank 0.
fix: Add the offset: targets = torch.arange(len(x)) + rank * len(x).
detected: `ddpcheck run` looks at cross entropies over products with a gathered matrix, cosine similarities and
torch.cdist, in some of the steps. It finds the rank's own rows in the matrix; if the ranks have them at different
places and the same targets, or as many in a row, and on some no target is one of these rows, that is reported. Losses
other than cross entropy, differences of rows that are written out, and rows that pass through a layer after they were
gathered, are not seen.
ignore: If the positives of a rank are meant to be rows of another one.
example:
logits = features @ torch.cat(all_gather(features)).T
loss = cross_entropy(logits, torch.arange(len(features)))  # right: + rank * len(features)

DDP805 mean-of-ranks-means: warning
A metric is the mean of the ranks' metrics, which is another one than that of all samples.
why: Each rank's mean counts as much as another's, however many samples it has. What is no mean over samples (an area
under a curve, F1, IoU) is another one on a part of the data. A sum that is divided by the size of the whole set is to
be added up: its mean is as many times too small as there are ranks. So the metric changes with the number of ranks.
fix: all_reduce the sum and the count over the ranks, then divide; gather the scores and labels for what is no mean.
detected: `ddpcheck run` looks at what ranks give to collectives after a pass over a loader without backward. It is
reported if that is on each rank a metric of what it has counted (the metrics are those of DDP802), and a number that is
printed, logged or saved is the mean or the sum of these, by more than 1 % another one than that of all samples. Metrics
of lists are known up to 2,048 samples a rank. A number that only a schedule is given is not seen.
ignore: If every rank has data of its own kind, and each kind is meant to count as much.
example:
loss = torch.tensor(total / len(own))    # right: all_reduce of total and len(own), then divide
dist.all_reduce(loss)
print(loss.item() / world_size)

DDP806 sum-reduced-again: warning
A running sum is all_reduced after each batch, and what that leaves goes into the next one.
why: all_reduce leaves the sum of all ranks on each of them. Where a rank adds to it and reduces it again, the sums of
earlier batches are counted as often as there are ranks, and again with each batch: the first batches have almost all of
the weight.
fix: Reduce once, after the loop; or reduce what came since the last time, and add that to the total.
detected: `ddpcheck run` looks at all_reduce of up to eight numbers, the first 64 times at a line. It is reported where,
four times in turn, each rank gives what the call before has left and about as much again, so that it grows by the
number of ranks.
ignore: If the number is to grow so.
example:
for x, y in batches:
    total += loss(ddp(x), y).detach()
    dist.all_reduce(total)               # right: after the loop
""")
