"""DDP208 parameter-value: error

The value of a parameter differs between ranks.

Why: DDP broadcasts rank 0's values once, when it is constructed, and never again. Values that differ after that stay
    different. Causes are init_sync=False, a checkpoint loaded on one rank, and re-initialisation after wrapping. The
    averaged gradient is then right for none of the models. (PyTorch docs, DistributedDataParallel: parameters are
    never broadcast between processes after construction.)
Fix: Construct the model under the same seed on every rank, let DDP synchronise (init_sync=True), and load values
    before wrapping.
Detected: Right after the wrapper is constructed, the ranks compare the values of their parameters, bit by bit. If a
    script averages gradients by hand, without a wrapper, `ddpcheck run` compares the initial values of these
    parameters.
Ignore: If the ranks train different models on purpose.
Explains: DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306; DDP516 if only the loss
Example:
    torch.manual_seed(dist.get_rank())       # every rank starts from other weights
    model = DistributedDataParallel(Net(), init_sync=False)   # right: leave init_sync at True
"""
