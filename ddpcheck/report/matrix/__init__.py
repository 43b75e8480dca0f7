"""The result of `check_matrix`, which is in `ddpcheck.extras.matrix`."""
