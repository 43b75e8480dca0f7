"""Judges of gradients: the reducer, the single process, loss scales, clips."""
