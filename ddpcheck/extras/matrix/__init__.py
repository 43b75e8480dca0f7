"""`check_matrix`: try the options of DDP one by one, and advise."""
