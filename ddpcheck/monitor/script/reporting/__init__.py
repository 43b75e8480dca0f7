"""In the process that reports: `check_options` (what a user may set), `hang_watch` (looks whether the ranks get on),
`log_judging` and `program_judging` (findings from the logs of all ranks), `ending` (how the script has ended),
`script_report` (the report), `flight_records` (the collectives as dumps of Flight Recorder).
"""
