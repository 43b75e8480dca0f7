"""Evaluations: what loops count, exchange and show."""
