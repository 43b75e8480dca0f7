"""Evaluations: metrics over all ranks, and what was counted."""
