"""DDP506 sampler-epoch: warning

The sampler's epoch never changes, so every epoch sees the same order.

Why: DistributedSampler seeds its shuffle with seed + epoch. Without set_epoch, the epoch stays 0. (PyTorch docs,
    DistributedSampler: call set_epoch before creating the iterator of each epoch.)
Fix: Call sampler.set_epoch(epoch) at the start of every epoch, on every rank.
Detected: `ddpcheck run` records the order of indices that each sampler gives. Four cases are reported. A sampler
    shuffles and gives the same order in each epoch. Persistent workers give the same samples again, although the
    program has changed an attribute of the dataset. A resumed epoch skips two or more batches that had not been
    trained on. Training continues from the state of an optimizer that has already seen the data, but the sampler is
    at epoch 0.
Ignore: If one order is intended, for example to compare two runs.
Reports: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 lucidrains/DALLE-pytorch#230
Example:
    for epoch in range(epochs):
        for x in loader:                     # right: loader.sampler.set_epoch(epoch) before this loop
            step(x)
"""
