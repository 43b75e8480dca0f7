"""Judges of evaluation: metrics over all ranks and duplicate samples."""
