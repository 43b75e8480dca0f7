"""DDP212 buffer-order: error, stops_ddp, stops_run

The same buffers are registered in a different order on different ranks.

Why: DDP broadcasts buffers by position, not by name. For example, rank 0's running mean then overwrites another
    rank's running variance. Nothing is raised if the shapes are equal.
Fix: Register buffers in a fixed order, never in the order of a set or of a directory listing.
Detected: Before DDP's first collective, the ranks compare the order of the buffers that all ranks have.
Ignore: Never. DDP broadcasts buffers by position.
Line: The line that registers the first module or buffer that is out of order.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    for name in {"mean", "variance"}:        # right: for name in ("mean", "variance")
        self.register_buffer(name, torch.zeros(8))
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_order

judge_buffer_order = partial(compare_order, "DDP212", "buffer")
