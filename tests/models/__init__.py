"""Architectures that nobody here wrote, from tiny configurations with random weights, and what ddpcheck says of them."""
