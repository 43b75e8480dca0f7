"""Ranks started by a launcher: detection, synchronization, worlds led by rank 0."""
