"""Implementation of the pytest plugin: run test code on ranks, report results."""
