"""In a rank: what it does is written down, and judged by nobody yet.

In this order: `on_path/sitecustomize` (begins in each Python process), `arming` (waits for a process group),
`constructions` (notes the lines that construct samplers and seed, from then on),
`rank_watch` (watches a rank), `script_watch` (writes down what a watch would exchange with the other ranks);
`loader_recorder`, `loss_recorder`, `optimizer_recorder`, `file_recorder` and `program_state` (what the script does
around its wrappers), `sample_rows` (what loaders give), `draw_recorder` (what steps draw),
`drawing_code` (what draws random numbers for a sample).
"""
