"""DDP311 saved-tensor-overwritten: error

A tensor that backward needs was overwritten after forward, in place or by a later buffer broadcast.

Why: A second forward under DDP broadcasts rank 0's buffers in place. If the first forward saved one of these buffers
    for backward, autograd raises an error about an in-place modification. If autograd does not notice the change, it
    silently uses the wrong values. (PyTorch docs, DistributedDataParallel, broadcast_buffers; autograd mechanics,
    'In-place correctness checks'.)
Fix: Run one forward on the concatenated inputs, clone the buffer before it is used, or pass broadcast_buffers=False
    and synchronise buffers yourself.
Detected: DDP311 is reported if autograd raises an error about an in-place change in backward. `ddpcheck report` also
    runs the step without the wrapper, and reports DDP311 only if this raises no error. The finding names the
    overwritten parameters, or the buffers that DDP broadcasts before each forward pass. If no error is raised,
    ddpcheck compares the gradients with the average of the ranks' own gradients. A difference is reported as DDP311
    only if DDP broadcast buffers in several forwards before one backward.
Ignore: Never. Backward has failed or has used wrong values.
Explains: DDP214 DDP215 DDP302 DDP304 DDP312
Reports: pytorch/pytorch#22095 pytorch/pytorch#65907 pytorch/pytorch#175024 pytorch/pytorch#110363
Example:
    real, fake = ddp(a), ddp(b)              # the second call overwrites buffers that the first one saved
    (real - fake).mean().backward()          # right: real, fake = ddp(torch.cat([a, b])).chunk(2)
"""
