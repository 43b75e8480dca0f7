"""The wrapper on a rank: its constructor and options, what a loop does with it, SyncBatchNorm on a CPU."""
