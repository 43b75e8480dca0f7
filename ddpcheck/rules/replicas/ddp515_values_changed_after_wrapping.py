"""DDP515 values-changed-after-wrapping: error

Something other than the optimizer changed parameter values after wrapping, on some ranks.

Why: DDP broadcasts only at construction. If rank 0 alone loads a checkpoint, or re-initialises, prunes or averages
    weights, only rank 0 changes. (PyTorch docs, DistributedDataParallel: parameters are never broadcast after
    construction.)
Fix: Make the change on every rank from the same data, or broadcast the parameters after it.
Detected: ddpcheck computes checksums of the parameters when the wrapper is constructed. The ranks compare checksums
    before the first forward pass and in later steps. Under fully_shard, `ddpcheck run` records the lines that write
    parameters before the first forward pass. It reports lines that only some ranks have reached.
Ignore: If the values are restored before the optimizer steps, as in sharpness-aware minimisation.
Explains: DDP208 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss
Example:
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 0:
        model.load_state_dict(checkpoint)    # right: load before wrapping, or on every rank
"""
