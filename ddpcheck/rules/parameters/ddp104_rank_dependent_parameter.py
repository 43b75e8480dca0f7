"""DDP104 rank-dependent-parameter: error, stops_ddp, by_family

A parameter contributes to the loss on some ranks of a step and not on others.

Why: Ranks with the gradient start the all-reduce of its bucket, and ranks without the gradient never start it. The
    job then hangs until the process group's timeout (30 minutes by default, 10 with nccl). Or the ranks without the
    gradient raise at their next forward, while the others are stuck in backward. (PyTorch docs,
    DistributedDataParallel: all ranks must take part in every gradient synchronisation.)
Fix: Make the branch the same on every rank (decide it from the step or a shared seed, not from the rank or its data),
    add 0.0 * output.sum() of the branch not taken, or pass find_unused_parameters=True.
Detected: In each step, before the first all-reduce, the ranks compare which parameters backward will reach. A
    parameter is reported if backward will reach it on some ranks only. The finding appears before the job hangs.
Ignore: Never. With find_unused_parameters=True, DDP handles such parameters, and ddpcheck does not report them.
Explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP305; quietly DDP304 DDP312; quietly DDP516 if only the loss
Reports: lhotse-speech/lhotse#554
Example:
    def forward(self, x):
        if dist.get_rank() == 0:             # or: if x.mean() > 0, which differs with the shard
            return self.left(x)
        return self.right(x)                 # right: self.left(x) + 0.0 * self.right(x), or one choice for all ranks
"""
