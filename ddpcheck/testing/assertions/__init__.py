"""Assertions for tests of distributed training, and their computations on each rank."""
