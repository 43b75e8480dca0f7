"""Recorders for the two runs of `ddpcheck run --check-parity`."""
