"""Recorders of evaluations: counters, exchanged results, shown metrics."""
