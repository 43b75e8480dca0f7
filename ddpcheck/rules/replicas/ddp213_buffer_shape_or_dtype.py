"""DDP213 buffer-shape-or-dtype: error, stops_run

The shape or dtype of a buffer differs between ranks.

Why: DDP does not compare buffers. The broadcast copies bytes from rank 0, and aborts if a rank's buffer is smaller.
    The end of a larger buffer keeps its old values. If only the dtype differs, the other ranks read these bytes as
    wrong numbers.
Fix: Give the buffer the same shape and dtype on every rank: pad it, or keep local data out of the buffers.
Detected: Before DDP's first collective, the ranks compare the shapes and dtypes of buffers with the same name.
Ignore: Never while buffers are broadcast.
Checks: report consistency, reducer; run replicas
Explains: quietly DDP522 if of graphs
Example:
    self.register_buffer("queue", torch.zeros(len(local_data), 8))   # right: a size that all ranks share
"""
