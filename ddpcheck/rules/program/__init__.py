"""Files, checkpoints, statistics and environment of the program."""
