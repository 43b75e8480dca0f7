"""Judges of parameters in the loss: unused, detached, conditional, zero gradients."""
