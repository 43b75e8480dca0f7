"""DDP405 uneven-iterations: error

Ranks run different numbers of synchronising iterations.

Why: Backward under DDP is a collective. A rank with one more batch waits for ranks that have left the loop. This rank
    hangs, or its collective is paired with a later one of the other ranks. (PyTorch docs,
    DistributedDataParallel.join and DistributedSampler, drop_last.)
Fix: Use DistributedSampler (it pads) or drop_last=True, or enter `with ddp.join():` around the loop.
Detected: ddpcheck compares which ranks have samples in a step, and how many batches the loader of each rank has. A
    difference is reported if ranks hang or fail because of it.
Ignore: Never. Inside `with ddp.join():` ranks do not hang, and nothing is reported.
Explains: DDP507
Reports: pytorch/pytorch#38174 pytorch/pytorch#33148 microsoft/PyMarlin#80
Example:
    files = all_files[rank::world_size]      # 5 files on rank 0, 4 on rank 1
    for file in files:                       # right: with ddp.join(): around the loop
        step(load(file))
"""
