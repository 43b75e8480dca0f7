"""DDP214 buffer-value: warning, takes_severity, spreads

A buffer has drifted: its value differs between ranks.

Why: With broadcast_buffers=False nothing synchronises buffers, not even at construction. Each rank then evaluates a
    different model, and a checkpoint keeps only rank 0's buffers. With broadcast_buffers=True, buffers are equal only
    right after DDP has broadcast them, at the start of forward. (PyTorch docs, DistributedDataParallel,
    broadcast_buffers.)
Fix: Give the buffer the same initial values, and compute it from the data of all ranks (SyncBatchNorm, or an
    all_reduce of the statistics); or synchronise it before evaluation and saving.
Detected: If the wrapper does not broadcast buffers, the ranks compare the values of their buffers, bit by bit. They
    do this after wrapping and after each checked step. `ddpcheck run` also compares the buffers of loss modules
    outside the wrapper. If several ranks evaluate a model after `update_bn`, `ddpcheck run` compares their BatchNorm
    statistics.
Ignore: If each rank should keep its own statistics, as plain BatchNorm does with broadcast_buffers=False.
Explains: DDP304 DDP312; DDP516 if only the loss
Reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
Example:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    DistributedDataParallel(model, broadcast_buffers=False)
    # right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
"""
