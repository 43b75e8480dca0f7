"""`check`: start the worlds, run the phases, and report the findings."""
