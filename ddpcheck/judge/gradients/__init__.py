"""Gradients and what they are of: the reducer, the single process, the scale of the loss, clips."""
