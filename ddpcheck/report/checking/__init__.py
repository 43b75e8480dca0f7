"""`check`: starts the worlds, has them run the phases, and makes a report of the findings."""
