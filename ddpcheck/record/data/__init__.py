"""Recorders of data loaders: samples, orders, random numbers."""
