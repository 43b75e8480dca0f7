"""`ddpcheck run`: watches the ranks of an unmodified script, which neither imports ddpcheck nor knows of it.

In the ranks, in this order: `environment` (what they inherit), `on_path/sitecustomize` (begins in each Python process),
`arming` (waits for a process group), `rank_watch` (watches a rank), `script_watch` (writes down what a watch would
exchange with the other ranks); `loader_recorder`, `optimizer_recorder`, `file_recorder` and `program_state` (what the
script does around its wrappers); `rank_log` and `collective_ring` (what a rank leaves).

In the process that reports: `check_options` (what a user may set), `hang_watch` (looks whether the ranks get on),
`log_judging` and `program_judging` (findings from the logs of all ranks), `ending` (how the script has ended),
`script_report` (the report), `flight_records` (the collectives as dumps of Flight Recorder).
"""
