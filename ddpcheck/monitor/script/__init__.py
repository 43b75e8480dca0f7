"""`ddpcheck run`: watches the ranks of an unmodified script, which neither imports ddpcheck nor knows of it.

Read in this order: `environment` (what the ranks inherit), `on_path/sitecustomize` (begins in each Python process),
`arming` (waits for a process group), `rank_watch` (watches the wrappers of a rank), `script_watch` (writes down what a
watch would exchange with the other ranks), `rank_log` (what a rank leaves), `judging` (findings from the logs of all
ranks), `script_report` (the report on them).
"""
