"""Judges of the data: samples, orders, draws, tables, files."""
