"""`ddpcheck run`: watches the ranks of an unmodified script, which neither imports ddpcheck nor knows of it.

`environment` is what the ranks inherit; `recording` begins in them and writes a `rank_log`, with a `collective_ring`;
`reporting` reads the logs of all ranks, while the script runs and when it has ended.
"""
