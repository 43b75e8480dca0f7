"""DDP519 samples-left-out: warning

Samples of the global batch are on no rank.

Why: Samples that are in no shard are not trained on. If a remainder is cut off, the batch shrinks by up to world size
    - 1 samples. If the batch is split by fixed sizes, the same samples are lost in every step. (PyTorch docs,
    DistributedSampler, drop_last.)
Fix: Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.
Detected: ddpcheck compares the samples of all shards with the batch, and the indices of all samplers with the
    dataset. For a loader, up to one batch per rank, or up to 5 % of the dataset, may be missing. Samples that another
    epoch takes are not reported. They are reported, however, if every pass takes at most half of the samples that its
    DistributedSampler gives to the rank. A framework has then split the samples a second time. Also reported: a
    sampler that splits by rank, although each rank's dataset already holds different samples.
Ignore: If samples are held out on purpose.
Explains: DDP303 DDP304 DDP305 DDP312
Example:
    def shard(batch, rank, world_size):
        return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
"""
