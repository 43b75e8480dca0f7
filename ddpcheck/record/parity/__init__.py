"""What both runs of `ddpcheck run --check-parity` record, and what the second one replays of the first."""
