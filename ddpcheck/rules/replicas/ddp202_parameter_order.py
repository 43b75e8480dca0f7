"""DDP202 parameter-order: error, stops_ddp, stops_run

The same parameters are registered in a different order on different ranks.

Why: DDP broadcasts and reduces by position. If the shapes are equal, nothing is raised, and DDP averages the
    gradients of different layers with each other. If the shapes differ, construction fails only on the rank that
    differs. (PyTorch docs, DistributedDataParallel: parameters must be registered in the same order.)
Fix: Register modules in a fixed order: iterate over a list or a sorted() set, never over a set or os.listdir().
Detected: Before DDP's first collective, the ranks compare the order of the parameters that all ranks have.
Ignore: Never. DDP pairs parameters by position.
Line: The line that registers the first module or parameter that is out of order.
Checks: report consistency; run replicas; repro layouts
Explains: DDP301 DDP302 DDP306 if an error; quietly DDP522 if of graphs
Example:
    for name in {"left", "right"}:           # the order of a set of strings differs between processes
        self.add_module(name, nn.Linear(8, 8))   # right: for name in ("left", "right")
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_order

judge_parameter_order = partial(compare_order, "DDP202", "parameter")
