"""The loss: its terms, their weights, and what it is scaled by."""
