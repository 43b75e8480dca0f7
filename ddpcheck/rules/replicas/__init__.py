"""Replicas: modules, values, buffers and wrappers on all ranks."""
