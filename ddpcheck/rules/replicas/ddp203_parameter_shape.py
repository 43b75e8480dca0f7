"""DDP203 parameter-shape: error, stops_ddp, stops_run

The shape of a parameter differs between ranks.

Why: DDP verifies sizes when it is constructed. The rank that differs raises, and the others get a closed connection
    or wait. (PyTorch docs, DistributedDataParallel: corresponding parameters must have the same sizes.)
Fix: Give the parameter the same size on every rank: compute the size once (vocabulary, number of classes) and
    broadcast it, or configure it.
Detected: Before DDP's first collective, the ranks compare the shapes of parameters with the same name.
Ignore: Never.
Line: The line that creates the first parameter. If a variable of the script has the size, the line that assigns the
    variable.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    classes = len(set(local_labels))         # counts what this rank happens to see; right: a constant for all ranks
    self.head = nn.Linear(8, classes)
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_attribute

judge_shape = partial(compare_attribute, "DDP203", "shape", "shape")
