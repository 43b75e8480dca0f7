"""Evaluation passes, exchanged results and shown numbers."""
