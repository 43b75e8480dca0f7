"""DDP221 wrapper-options: error, unless_split, stops_run

The options of DistributedDataParallel differ between ranks.

Why: If find_unused_parameters differs, the ranks hang. If static_graph differs, the process aborts. If bucket_cap_mb
    differs and find_unused_parameters=True is set, the process aborts too. If broadcast_buffers differs, some ranks
    wait in a broadcast that the others never start.
Fix: Pass the same options on every rank; take them from one configuration that all ranks read.
Detected: Before DDP's first collective, the ranks compare the arguments of DistributedDataParallel. Under fully_shard,
    `ddpcheck run` compares the mixed precision policies.
Ignore: Never. The options decide which collectives run.
Line: The line that calls the constructor of DistributedDataParallel on the first rank that differs.
Checks: report wrapping; run replicas; repro options
Explains: quietly DDP522 if of graphs
Example:
    DistributedDataParallel(model, find_unused_parameters=dist.get_rank() == 0)   # right: one value for all
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import judge_options

STOPPED = "DDP221: DDP would stop, hang or abort"
judge_wrapper_options = partial(judge_options, "DDP221")
