"""DDP301 not-synchronised: error, spreads

A gradient differs between ranks after a backward pass that should have synchronised it.

Why: When DDP works, every rank holds bit-identical gradients after backward. A difference means that the reducer did
    not average this parameter: its bucket never filled, its hooks are gone, or the inner module was called instead of
    the wrapper. Each rank now trains its own model. (PyTorch docs, DistributedDataParallel; notes on DDP.)
Fix: Call the wrapper, not ddp.module; leave no_sync before the last backward pass; wrap the module once it is
    complete; and fix unused parameters (DDP1xx) first.
Detected: After a backward pass that synchronises, the ranks compare each gradient, bit by bit. Correct gradients are
    bit-identical, so there is no tolerance. If a rule for the cause applies (DDP101, DDP501, DDP503 and others), that
    rule is reported instead.
Ignore: If each rank changes its gradients on purpose after they were averaged.
Explains: DDP306
Reports: pytorch/pytorch#112152 pytorch/pytorch#109191
Example:
    output = ddp.module(x)                   # right: output = ddp(x)
    output.sum().backward()
"""
