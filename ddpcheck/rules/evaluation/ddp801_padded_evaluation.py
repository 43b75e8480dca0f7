"""DDP801 padded-evaluation: warning

A sampler gave some samples to two ranks, and a metric counts these samples twice.

Why: DistributedSampler gives every rank the same number of samples. If the world size does not divide the dataset,
    the sampler repeats some samples. In training, this hardly matters. A metric over all ranks counts the repeated
    samples twice, and changes with the number of ranks. (PyTorch docs, DistributedSampler, drop_last.)
Fix: Cut gathered results to the length of the dataset, evaluate with a sampler that repeats nothing
    (indices[rank::world_size]), or evaluate on one rank with the inner module.
Detected: In a pass without backward, `ddpcheck run` looks for indices that the loaders of several ranks give. DDP801
    is reported if a metric counts these samples twice, in one of three ways. (1) Each rank passes the number of its
    samples to a collective, or a confusion matrix whose entries add up to this number. (2) Each rank passes a mean
    over its samples to a collective. (3) A printed, logged or saved number is a metric over all gathered rows. Not
    covered: sums divided by the length of the dataset, and results that files or other processes evaluate.
Ignore: If the dataset is large, and the metric only has to be roughly right.
Example:
    correct, total = evaluate(ddp, DataLoader(data, sampler=DistributedSampler(data)))
    counts = torch.tensor([correct, total])  # right: of a loader over Subset(data, range(rank, len(data), world_size))
    dist.all_reduce(counts)
"""
