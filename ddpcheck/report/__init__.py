"""Whole checks of a recipe and what they return: `check`, `check_matrix`, `ddpcheck graph`, `--repro`."""
