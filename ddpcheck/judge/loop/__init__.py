"""Judges of the training loop: passes, reductions, `no_sync`, optimizer steps, wrappers."""
