"""`check_matrix`: the options of DDP tried one by one, and what they mean for a model."""
