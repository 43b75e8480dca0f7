"""Samples, loaders, samplers and random draws."""
