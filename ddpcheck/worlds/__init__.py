"""Processes of a `World`: fork server, rank lifecycle, and parent-rank messages.

Only `init_dist` of `launchers`, which runs on ranks, imports torch at module level.
"""
