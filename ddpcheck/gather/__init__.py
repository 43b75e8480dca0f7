"""Gathering evidence, on a rank or in a reference process. All but `patching` imports torch, and nothing judges."""
