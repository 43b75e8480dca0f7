"""Phases of a check on ranks and single process; called by `ddpcheck.report.calls`."""
