"""Monitoring of a `DistributedDataParallel` training loop at runtime."""
