"""Judges of state that ranks replicate: modules, values, buffers, options, copies."""
