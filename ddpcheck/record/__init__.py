"""Record the training loop of one rank, for later analysis."""
