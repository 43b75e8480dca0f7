"""`check_schedule`: the collectives of many ranks, simulated one by one, and whether they pair up."""
