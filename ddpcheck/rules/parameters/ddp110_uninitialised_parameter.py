"""DDP110 uninitialised-parameter: error

A lazy parameter is wrapped before its shape is known.

Why: DDP broadcasts and buckets parameters when it is constructed, and needs their sizes. It refuses a module with
    uninitialised parameters. (PyTorch docs, LazyModuleMixin: initialise with dry runs.)
Fix: Run one forward pass with a batch of the right shape (under no_grad) on every rank before wrapping.
Detected: ddpcheck inspects the parameters of the module right before wrapping. A parameter without a known shape is
    reported.
Ignore: Never. DDP refuses such a module.
Example:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    DistributedDataParallel(model)           # right: model(torch.zeros(1, 16)) first
"""
