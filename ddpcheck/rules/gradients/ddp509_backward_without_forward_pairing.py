"""DDP509 backward-without-forward-pairing: error

The wrapper's forward and backward passes do not come in pairs.

Why: A forward prepares the reducer, and one backward finishes it. A second backward of the same forward is not
    reduced. A forward without a backward leaves the reducer waiting. Several forwards and backwards must have the
    same order on all ranks. (PyTorch docs, DistributedDataParallel.)
Fix: Call forward once and backward once a step; add losses up before backward; use no_grad for forwards that do not
    train.
Detected: ddpcheck records the wrapper's forward and backward passes in order. It reports a second backward pass
    without its own forward, if an optimizer uses its gradients. It also reports a second pass that makes DDP raise.
Ignore: If the gradients of the second pass are only inspected, and no optimizer uses them.
Explains: DDP101 DDP102 DDP103 DDP301 DDP302 DDP306 DDP406
Example:
    one, other = ddp(a).mean(), ddp(b).mean()
    one.backward()
    other.backward()                         # right: (one + other).backward()
"""
