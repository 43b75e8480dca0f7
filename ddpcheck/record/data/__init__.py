"""Data loaders: samples, orders, random numbers."""
