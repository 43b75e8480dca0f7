"""Judges of failed ranks: exceptions, crashes, hangs and divergence."""
