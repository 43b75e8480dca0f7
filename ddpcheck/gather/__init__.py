"""Gather evidence on ranks or in a reference process, without judging it."""
