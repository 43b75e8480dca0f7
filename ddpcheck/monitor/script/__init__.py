"""`ddpcheck run`: watches the ranks of an unmodified script, which neither imports ddpcheck nor knows of it.

`environment` is what the ranks inherit; `recording` begins in them and writes the logs of `ddpcheck.stream`;
`reporting` reads the logs of all ranks, while the script runs and when it has ended.
"""
