"""DDP223 optimizer-options: error

The optimizer, its options or its parameter groups differ between ranks.

Why: DDP averages gradients and nothing else. The ranks stay equal only if every optimizer makes the same update from
    these gradients. With a different learning rate, momentum or order of groups, the ranks silently diverge from the
    first step. (PyTorch docs, DistributedDataParallel: all processes must make the same parameter updates.)
Fix: Construct the optimizer from the same options and the same order of parameters on every rank.
Detected: Before training and at the optimizer's steps, the ranks compare the class, the options and the parameter
    groups of the optimizer.
Ignore: If the optimizer holds parameters that only one rank trains.
Explains: DDP306
Example:
    SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))   # right: lr=0.1 on every rank
"""
