"""Implementation of the pytest plugin: run test code on ranks, report results.

Only `assertions.on_rank`, which runs on ranks, imports torch at module level.
"""
