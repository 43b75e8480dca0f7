"""Architectures that nobody here wrote, with random weights, and what ddpcheck says of them."""
