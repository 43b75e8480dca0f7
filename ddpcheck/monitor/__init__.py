"""Watching a training loop under `DistributedDataParallel` while it runs: one core, to which every door attaches."""
