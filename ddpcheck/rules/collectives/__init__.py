"""Collectives, hangs and failures of ranks."""
