"""The processes behind a `World`: the fork server, the ranks' life and death, and what travels between them.

Nothing here imports torch at its top but `init_dist` of `launchers`, which runs on ranks.
"""
