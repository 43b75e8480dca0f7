"""The second run of a script, in one process, with which the first is compared."""
