"""DDP201 parameter-set: error, stops_ddp, stops_run

The set of parameters differs between ranks.

Why: DDP matches parameters by position. At construction DDP compares how many parameters require grad, and their
    sizes, but not their names. If the numbers differ, some ranks raise and the others lose the connection. If only
    the names differ, DDP averages tensors that have nothing to do with each other. (PyTorch docs,
    DistributedDataParallel: the model must be the same on every rank.)
Fix: Build the same module on every rank: the constructor must not depend on the rank, its data or its environment.
Detected: Before DDP's first collective, the ranks compare the names of their parameters.
Ignore: Never. Ranks with different parameters cannot train one model.
Line: The line that registers the outermost module or parameter that differs. If a variable of the script counts the
    modules, the line that assigns the variable.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Reports: pytorch/pytorch#102438 huggingface/accelerate#1481 NJU-PCALab/STAR#44
Example:
    if dist.get_rank() == 0:
        model.probe = nn.Linear(8, 8)        # right: on every rank, or on none
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_sets

judge_parameter_set = partial(compare_sets, "DDP201", "parameter")
