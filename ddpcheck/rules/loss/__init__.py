"""The loss: scale, normalisation, and comparison with a single process."""
