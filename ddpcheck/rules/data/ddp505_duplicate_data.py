"""DDP505 duplicate-data: error

Ranks train on the same samples in the same step.

Why: The average of equal gradients is the same gradient, so all ranks together do the work of one. Usually the loader
    has no DistributedSampler, or the sampler has the same rank number in every process. (PyTorch docs,
    DistributedSampler.)
Fix: Give the loader a DistributedSampler, split data by rank and world size, or use seed + rank as the seed of the
    generator that draws the samples.
Detected: ddpcheck compares the samples of the ranks in each step: a recipe's shards, samples from data loaders, and
    inputs of forward. Equal samples are reported. Without a wrapper, ddpcheck compares the gradients that the ranks
    all_reduce. Three cases are reported as warnings: (1) The ranks' parts of a dataset overlap within an epoch. (2) A
    rank gets the samples of another rank some steps later. (3) The targets of a loss are the same on every rank, but
    the inputs of forward differ. Some ranks should share samples: with tensor, context or sequence parallelism, a
    loss over all ranks, or repeated augmentation. If ddpcheck recognises this, nothing is reported.
Ignore: If all ranks should see the same samples, for example with different augmentation or in a part of the loss.
Explains: DDP303 DDP304 DDP305 DDP312
Reports: PatrickHua/SimSiam#16 Lightning-AI/pytorch-lightning#7813 coqui-ai/Trainer#144
Example:
    def shard(batch, rank, world_size):
        return batch[: len(batch) // world_size]   # right: return batch[rank::world_size]
"""
