"""The phases of a check, as ranks and the single process run them; `ddpcheck.report.calls` calls them."""
