"""DDP on a rank: constructor and options, training loop events, SyncBatchNorm on CPU."""
