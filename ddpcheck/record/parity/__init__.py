"""Recorders of both runs of `ddpcheck run --check-parity`, and the replay of the first in the second."""
