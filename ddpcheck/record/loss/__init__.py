"""Recorders of the loss: its terms, weights and scale factors."""
