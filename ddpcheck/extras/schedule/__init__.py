"""`check_schedule`: simulate many ranks one by one and check if their collectives match."""
