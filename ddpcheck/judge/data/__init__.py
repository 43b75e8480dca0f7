"""The data: samples, orders, draws, tables, files."""
