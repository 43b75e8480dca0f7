"""Complete checks of a recipe and their results: `check`, `check_matrix`, `ddpcheck graph`, `--repro`."""
