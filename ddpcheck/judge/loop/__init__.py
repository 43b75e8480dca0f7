"""The training loop: passes, reductions, `no_sync`, optimizer steps; and all of it on each wrapper."""
