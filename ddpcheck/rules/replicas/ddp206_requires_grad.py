"""DDP206 requires-grad: error, stops_ddp, stops_run

A parameter requires grad on one rank and is frozen on another.

Why: Only parameters that require grad are put into buckets, by position. If the numbers of these parameters differ,
    construction raises. If the numbers and the shapes are equal, nothing is raised, and the gradients of different
    layers are averaged. (PyTorch docs, DistributedDataParallel: requires_grad must be the same on all ranks.)
Fix: Freeze the same parameters on every rank, before wrapping.
Detected: Before DDP's first collective, the ranks compare requires_grad of each parameter. After a forward pass that
    may change requires_grad, the ranks compare it again.
Ignore: Never. Freeze the same parameters on every rank.
Line: In `ddpcheck run`, the line that wraps the module. In `ddpcheck report`, the line that creates or assigns the
    first parameter.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    model.layers[dist.get_rank()].requires_grad_(False)   # right: the same layer on every rank
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_attribute

judge_requires_grad = partial(compare_attribute, "DDP206", "requires_grad", "value of requires_grad")
