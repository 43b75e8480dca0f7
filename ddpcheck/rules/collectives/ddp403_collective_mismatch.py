"""DDP403 collective-mismatch: error

Ranks enter different collectives, or the same one with different shapes or dtypes, at the same point.

Why: Collectives of a group are matched by order, not by name. With nccl, a wrong pair hangs. With gloo, it aborts the
    process or closes the connection. A wrong pair may also silently mix up numbers. (PyTorch docs, torch.distributed:
    collectives must be called in the same order on all ranks.)
Fix: Call the same collectives in the same order with the same shapes and dtypes on every rank.
Detected: Each rank logs every collective before the call, with its operation, shape, dtype and line. ddpcheck aligns
    the logs of each process group by sequence number. It reports the first collective that differs. `ddpcheck hang`
    does the same with Flight Recorder dumps.
Ignore: Never, if the operations differ. A difference in lines alone is reported only if a rank hangs because of it.
Reports: alan-turing-institute/autocast#386
Example:
    if dist.get_rank() == 0:
        dist.all_reduce(metric)              # the others are in backward already; right: on every rank
    loss.backward()
"""
