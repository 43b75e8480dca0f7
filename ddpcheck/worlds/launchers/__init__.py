"""Ranks that a launcher has started: who they are, work that they do in step, and worlds that rank 0 leads."""
