"""DDP211 buffer-set: error, stops_ddp, stops_run

The set of buffers differs between ranks.

Why: DDP broadcasts buffers by position. If a rank has one buffer fewer, all later buffers are paired with wrong ones.
    Or the process aborts inside the backend, without a Python traceback. (PyTorch docs, DistributedDataParallel,
    broadcast_buffers.)
Fix: Register the same buffers on every rank, before wrapping.
Detected: Before DDP's first collective, the ranks compare the names of their buffers.
Ignore: If broadcast_buffers=False is set and the buffer is local on purpose. Make the buffer a plain attribute then.
Line: The line that registers the outermost module or buffer that differs. If a variable of the script counts the
    modules, the line that assigns the variable.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    if dist.get_rank() == 0:
        model.register_buffer("best", torch.zeros(()))   # right: on every rank, or a plain Python attribute
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_sets

judge_buffer_set = partial(compare_sets, "DDP211", "buffer")
