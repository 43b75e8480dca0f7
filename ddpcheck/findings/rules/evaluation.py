"""DDP8xx: evaluation, and what is computed from gathered results."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP801 padded-evaluation: warning
A sampler gave some samples to two ranks, and a metric counts these samples twice.
why: DistributedSampler gives every rank the same number of samples. If the world size does not divide the dataset, the
sampler repeats some samples. In training, this hardly matters. A metric over all ranks counts the repeated samples
twice, and changes with the number of ranks. (PyTorch docs, DistributedSampler, drop_last.)
fix: Cut gathered results to the length of the dataset, evaluate with a sampler that repeats nothing
(indices[rank::world_size]), or evaluate on one rank with the inner module.
detected: In a pass without backward, `ddpcheck run` looks for indices that the loaders of several ranks give. DDP801 is
reported if a metric counts these samples twice, in one of three ways. (1) Each rank passes the number of its samples to
a collective, or a confusion matrix whose entries add up to this number. (2) Each rank passes a mean over its samples to
a collective. (3) A printed, logged or saved number is a metric over all gathered rows. Not covered: sums divided by the
length of the dataset, and results that files or other processes evaluate.
ignore: If the dataset is large, and the metric only has to be roughly right.
example:
correct, total = evaluate(ddp, DataLoader(data, sampler=DistributedSampler(data)))
counts = torch.tensor([correct, total])  # right: of a loader over Subset(data, range(rank, len(data), world_size))
dist.all_reduce(counts)

DDP802 own-shard-metric: warning
One rank shows a metric of its shard, or decides by it, as if it covered all samples.
why: Each rank evaluates 1/W of the data (W is the world size). Rank 0 may print or log its own metric, or select the
best checkpoint by it. This metric is a noisy estimate, and changes with the number of ranks. DDP reduces gradients and
nothing else.
fix: all_reduce the sum and the count over the ranks, then divide; or evaluate all of the data on one rank.
detected: After a pass over a loader without backward, `ddpcheck run` reads the variables of the script's functions. It
reads counters, sums, meters, confusion matrices, and lists with one number or label per sample. From these, it computes
metrics of each rank: means, accuracy, IoU, F1, precision, recall and areas under curves. A mean may be shown as its
error rate, root or exponential. DDP802 is reported if two conditions hold. Some ranks, not all, print, log or save a
metric of the samples on that rank alone. (Or they save a file inside an `if` that tests this metric.) The metric has a
different value on the other ranks and over all ranks together. To rule out coincidence, the number must match the
metric after each evaluation. The number must also be specific: 91 is enough, 0.5 is not. DDP802 is also reported if one
rank alone evaluates, but its DistributedSampler splits the data between several ranks. Only the first three passes over
a loader are covered. A loop without a DataLoader is not covered. If a schedule gets such a metric, see DDP518.
ignore: If the number is intended as the metric of one rank, and is labelled so.
reports: Lightning-AI/pytorch-lightning#379
example:
accuracy = correct / total               # right: dist.all_reduce of correct and total first
if rank == 0:
    print(f"accuracy {accuracy:.4f}")

DDP803 order-of-gathered-results: warning
Results are gathered rank by rank, and compared with labels in the order of the dataset.
why: DistributedSampler gives rank r the samples r, r + W, r + 2W and so on (W is the world size). all_gather returns
all results of rank 0 first, then all results of rank 1. So results are compared with the labels of other samples, and
the metric is no better than a guess.
fix: Gather the labels or the indices with the results, or put the results back in order: torch.stack(gathered,
1).flatten(0, 1)[:len(dataset)].
detected: `ddpcheck run` keeps the results that ranks gather during or after an evaluation (a loop over a loader without
backward). It also keeps the labels of the loader or the dataset. From results and labels in their given order, it
computes accuracy, mean error, correlation and similar metrics. DDP803 is reported if a printed, logged or saved number
is such a metric, and would be different if each sample were compared with its own label. DDP803 is also reported if the
script itself compares results and labels in this order. Numbers that the script rounds to fewer than three digits are
not covered.
ignore: Never: the metric is not that of the model.
example:
dist.all_gather(parts, predictions)      # of a loader with a DistributedSampler
accuracy = (torch.cat(parts) == dataset.labels).float().mean()  # right: gather the labels too

DDP804 targets-without-offset: error
Targets index rows gathered from all ranks, without the offset of the rank's own rows.
why: In the result of all_gather, the rows of rank r begin at r * batch size. With targets arange(batch size) on every
rank, all ranks except the first learn to match their samples with those of rank 0.
fix: Add the offset: targets = torch.arange(len(x)) + rank * len(x).
detected: In some steps, `ddpcheck run` checks cross entropies whose logits compare features with a gathered matrix
(products, cosine similarity, torch.cdist). It finds the rank's own rows in the matrix. DDP804 is reported if three
conditions hold. Each rank's rows begin at a different index. All ranks have the same targets, or the targets of each
rank are consecutive numbers. At least one rank has no target among its own rows, and at least one other rank has such a
target. Not covered: other losses, differences that the script computes itself, and rows that pass through a layer after
the gather.
ignore: If the positives of a rank are rows of another rank on purpose.
example:
logits = features @ torch.cat(all_gather(features)).T
loss = cross_entropy(logits, torch.arange(len(features)))  # right: + rank * len(features)

DDP805 mean-of-ranks-means: warning
A metric is the mean of the ranks' metrics, which differs from the metric over all samples.
why: Each rank's mean has the same weight, however many samples the rank has. A metric that is not a mean over samples
(an area under a curve, F1, IoU) has a different value on a part of the data. If each rank divides its sum by the size
of the whole dataset, the results have to be added up. Their mean is too small by a factor of the world size. In all
cases, the metric changes with the number of ranks.
fix: all_reduce the sum and the count over the ranks, then divide; for a metric that is not a mean, gather the scores
and labels.
detected: `ddpcheck run` checks the values that ranks give to collectives after a pass over a loader without backward.
DDP805 is reported if three conditions hold. The value that each rank gives is a metric of the samples on that rank
(DDP802 lists the metrics). A printed, logged or saved number is the mean or the sum of these values. This number
differs by more than 1 % from the metric over all samples. Metrics of lists (one score or label per sample) are covered
up to 2,048 samples per rank. A number that is only passed to a learning rate schedule is not covered.
ignore: If each rank has a different kind of data, and each kind should have the same weight.
example:
loss = torch.tensor(total / len(own))    # right: all_reduce of total and len(own), then divide
dist.all_reduce(loss)
print(loss.item() / world_size)

DDP806 sum-reduced-again: warning
A running sum is all_reduced after each batch, and the reduced sum is used in the next one.
why: all_reduce leaves the sum of all ranks on each rank. If a rank adds to this sum and reduces it again, the sums of
earlier batches are multiplied by the number of ranks. This happens with each batch, so the first batches have almost
all of the weight.
fix: Reduce once, after the loop; or reduce the part since the last time, and add that to the total.
detected: `ddpcheck run` compares what each rank gives to an all_reduce with the previous result at the same line.
DDP806 is reported if each rank gives the previous result plus a new part of about the same size, four times in a row.
Only the first 64 calls at a line, with up to eight numbers each, are covered.
ignore: If the number grows this way on purpose.
example:
for x, y in batches:
    total += loss(ddp(x), y).detach()
    dist.all_reduce(total)               # right: after the loop
""")
