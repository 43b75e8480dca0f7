"""Gradients: local, reduced, changed, used and zeroed."""
