"""Gathering evidence, on a rank or in a reference process. Everything here imports torch, and judges nothing."""
