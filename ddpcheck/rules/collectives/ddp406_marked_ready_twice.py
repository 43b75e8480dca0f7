"""DDP406 marked-ready-twice: error, stops_ddp

A parameter's gradient is marked ready twice in one backward pass.

Why: DDP expects one gradient per parameter and iteration. A second one arrives if a re-entrant checkpoint encloses a
    module that is used more than once, or if a parameter is used outside forward. DDP then raises 'Expected to mark a
    variable ready only once'. With re-entrant checkpoints, DDP may instead raise nothing and average only a part of
    the gradient (pytorch issue 109191). (PyTorch docs, DistributedDataParallel and torch.utils.checkpoint.)
Fix: Use checkpoint(..., use_reentrant=False), call shared modules inside forward, or set static_graph=True.
Detected: ddpcheck counts how often the gradient of each parameter arrives in one backward pass. If DDP raises, the
    names of the parameters come from its message.
Ignore: If static_graph=True is set: DDP then handles a second arrival.
Explains: DDP301 DDP302
Reports: huggingface/accelerate#389 microsoft/FocalNet#4 lucidrains/DALLE2-pytorch#225 pytorch/pytorch#109191
Example:
    h = checkpoint(self.block, x, use_reentrant=True)
    h = checkpoint(self.block, h, use_reentrant=True)   # right: use_reentrant=False in both
"""
