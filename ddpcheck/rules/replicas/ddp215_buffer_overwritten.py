"""DDP215 buffer-overwritten: warning, takes_severity, spreads, stops_run

A buffer that a rank computed is discarded: the broadcast replaces it with rank 0's.

Why: In each step, DDP broadcasts rank 0's buffers at the start of forward. Statistics, counters and queues of the
    other ranks are lost. The buffer then describes rank 0's samples only. (PyTorch docs, DistributedDataParallel,
    broadcast_buffers.)
Fix: Reduce the buffer over all ranks yourself (SyncBatchNorm, or all_reduce before the update), or accept that the
    buffer describes rank 0's samples only, and ignore DDP215 for it.
Detected: After each step, the ranks compare the values of their buffers. A buffer is reported if its values differ,
    and the wrapper broadcasts rank 0's values before the next forward.
Ignore: If rank 0's samples represent the data well enough. Most people accept this for the running statistics of
    BatchNorm.
Checks: report wrapping, reducer; run replicas
Explains: DDP516 if only the loss
Reports: huggingface/pytorch-image-models#110 facebookresearch/moco#41
Example:
    def forward(self, x):
        self.seen += x.shape[0]              # right: count = torch.tensor(x.shape[0]); dist.all_reduce(count)
        return self.body(x)
"""
