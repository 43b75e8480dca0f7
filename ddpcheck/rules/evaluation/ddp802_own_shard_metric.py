"""DDP802 own-shard-metric: warning

One rank shows a metric of its shard, or decides by it, as if it covered all samples.

Why: Each rank evaluates 1/W of the data (W is the world size). Rank 0 may print or log its own metric, or select the
    best checkpoint by it. This metric is a noisy estimate, and changes with the number of ranks. DDP reduces
    gradients and nothing else.
Fix: all_reduce the sum and the count over the ranks, then divide; or evaluate all of the data on one rank.
Detected: After a pass over a loader without backward, `ddpcheck run` reads the variables of the script's functions.
    It reads counters, sums, meters, confusion matrices, and lists with one number or label per sample. From these, it
    computes metrics of each rank: means, accuracy, IoU, F1, precision, recall and areas under curves. A mean may be
    shown as its error rate, root or exponential. DDP802 is reported if two conditions hold. Some ranks, not all,
    print, log or save a metric of the samples on that rank alone. (Or they save a file inside an `if` that tests this
    metric.) The metric has a different value on the other ranks and over all ranks together. To rule out coincidence,
    the number must match the metric after each evaluation. The number must also be specific: 91 is enough, 0.5 is
    not. DDP802 is also reported if one rank alone evaluates, but its DistributedSampler splits the data between
    several ranks. Only the first three passes over a loader are covered. A loop without a DataLoader is not covered.
    If a schedule gets such a metric, see DDP518.
Ignore: If the number is intended as the metric of one rank, and is labelled so.
Reports: Lightning-AI/pytorch-lightning#379
Example:
    accuracy = correct / total               # right: dist.all_reduce of correct and total first
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
"""
