"""DDP805 mean-of-ranks-means: warning

A metric is the mean of the ranks' metrics, which differs from the metric over all samples.

Why: Each rank's mean has the same weight, however many samples the rank has. A metric that is not a mean over samples
    (an area under a curve, F1, IoU) has a different value on a part of the data. If each rank divides its sum by the
    size of the whole dataset, the results have to be added up. Their mean is too small by a factor of the world size.
    In all cases, the metric changes with the number of ranks.
Fix: all_reduce the sum and the count over the ranks, then divide; for a metric that is not a mean, gather the scores
    and labels.
Detected: `ddpcheck run` checks the values that ranks give to collectives after a pass over a loader without backward.
    DDP805 is reported if three conditions hold. The value that each rank gives is a metric of the samples on that
    rank (DDP802 lists the metrics). A printed, logged or saved number is the mean or the sum of these values. This
    number differs by more than 1 % from the metric over all samples. Metrics of lists (one score or label per sample)
    are covered up to 2,048 samples per rank. A number that is only passed to a learning rate schedule is not covered.
Ignore: If each rank has a different kind of data, and each kind should have the same weight.
Example:
    loss = torch.tensor(total / len(own))    # right: all_reduce of total and len(own), then divide
    dist.all_reduce(loss)
    print(loss.item() / world_size)
"""
