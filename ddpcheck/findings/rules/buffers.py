"""DDP21x: buffers and other state of modules, which have to be the same on every rank."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP211 buffer-set: error
The set of buffers differs between ranks.
why: DDP broadcasts buffers by position. If a rank has one buffer fewer, the process aborts inside the backend without a
Python traceback, or all buffers that follow are shifted. (PyTorch docs, DistributedDataParallel, broadcast_buffers.)
fix: Register the same buffers on every rank, before wrapping.
detected: Before DDP's first collective, the ranks compare the names of their buffers.
ignore: If broadcast_buffers=False is set and the buffer is local on purpose. Make the buffer a plain attribute then.
example:
if dist.get_rank() == 0:
    model.register_buffer("best", torch.zeros(()))   # right: on every rank, or a plain Python attribute

DDP212 buffer-order: error
The same buffers are registered in a different order on different ranks.
why: DDP broadcasts buffers by position, not by name. Rank 0's running mean then overwrites another rank's running
variance, for example. Nothing is raised if the shapes are equal.
fix: Register buffers in a fixed order, never in the order of a set or of a directory listing.
detected: Before DDP's first collective, the ranks compare the order of the buffers that all ranks have.
ignore: Never. DDP broadcasts buffers by position.
example:
for name in {"mean", "variance"}:        # right: for name in ("mean", "variance")
    self.register_buffer(name, torch.zeros(8))

DDP213 buffer-shape-or-dtype: error
The shape or dtype of a buffer differs between ranks.
why: DDP does not compare buffers. The broadcast copies bytes from rank 0. It aborts if the sizes differ. If only the
dtype differs, the bytes are reinterpreted.
fix: Give the buffer the same shape and dtype on every rank: pad it, or keep local data out of the buffers.
detected: Before DDP's first collective, the ranks compare the shapes and dtypes of buffers with the same name.
ignore: Never while buffers are broadcast.
example:
self.register_buffer("queue", torch.zeros(len(local_data), 8))   # right: a size that all ranks share

DDP214 buffer-value: warning, takes_severity, spreads
A buffer has drifted: its value differs between ranks.
why: With broadcast_buffers=False nothing synchronises buffers, not even at construction. Each rank then evaluates a
different model, and a checkpoint keeps only rank 0's buffers. With broadcast_buffers=True the buffers are equal only
right after a synchronising forward begins. (PyTorch docs, DistributedDataParallel, broadcast_buffers.)
fix: Give the buffer the same initial values, and compute it from the data of all ranks (SyncBatchNorm, or an all_reduce
of the statistics); or synchronise it before evaluation and saving.
detected: If the wrapper does not broadcast buffers, the ranks compare fingerprints of the buffers after wrapping and
after each compared step. `ddpcheck run` also compares the buffers of a criterion outside of the wrapper. BatchNorm
statistics that are recomputed after training (`update_bn`) are compared if several ranks evaluate a model with them.
ignore: If each rank should keep statistics of only its samples, as plain BatchNorm does with broadcast_buffers=False.
explains: DDP304 DDP312; DDP516 if only the loss
reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
example:
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
DistributedDataParallel(model, broadcast_buffers=False)
# right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))

DDP215 buffer-overwritten: warning, takes_severity, spreads
A buffer that a rank computed is discarded: the broadcast replaces it with rank 0's.
why: DDP broadcasts rank 0's buffers at the start of each synchronising forward. Statistics, counters and queues of the
other ranks are lost. The buffer then describes rank 0's shard only. (PyTorch docs, DistributedDataParallel,
broadcast_buffers.)
fix: Reduce the buffer over all ranks yourself (SyncBatchNorm, or all_reduce before the update), or accept that it is a
sample from rank 0 and ignore DDP215 for it.
detected: Fingerprints of a buffer differ between ranks after a step. The wrapper broadcasts rank 0's buffer before the
next forward.
ignore: If rank 0's samples represent the data well enough. Most people accept this for the running statistics of
BatchNorm.
explains: DDP516 if only the loss
reports: huggingface/pytorch-image-models#110 facebookresearch/moco#41
example:
def forward(self, x):
    self.seen += x.shape[0]              # right: count = torch.tensor(x.shape[0]); dist.all_reduce(count)
    return self.body(x)

DDP216 unregistered-state: warning, takes_severity
A tensor that is a plain attribute of a module, neither parameter nor buffer, differs between ranks.
why: DDP synchronises only parameters and buffers. Each rank builds any other tensor from its own random numbers or
data. The tensor stays different, and is missing from the state dict.
fix: Build it in __init__ from the same seed on every rank, or register it with register_buffer before wrapping. If it
changes during training, make the same change on every rank: all_reduce the values that it is computed from.
detected: The ranks compare fingerprints of the tensors that modules hold as plain attributes, before the first step and
after each. A tensor is reported if it differs between ranks. If the first step makes the tensor, the gradients must
also differ from those of the global batch.
ignore: If the tensor is a cache of the rank's own samples, or differs on purpose.
explains: DDP303 DDP304 DDP312; DDP516 if only the loss
example:
self.projection = torch.randn(8, 8)      # right: self.register_buffer("projection", torch.randn(8, 8))

DDP217 input-statistics: warning
Each rank normalises the inputs by running statistics of only its samples.
why: DDP synchronises only the parameters and buffers of the wrapped module. A script may keep a running mean or
variance beside the module (an observation normaliser, a scaler that is updated in the loop). These statistics come from
the samples of one rank. The same sample then has a different value on each rank, and a checkpoint keeps the statistics
of rank 0. (PyTorch docs, DistributedDataParallel.)
fix: Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before adding them to the statistics;
or keep the statistics in buffers of the wrapped module, as nn.SyncBatchNorm does.
detected: In some calls of forward, `ddpcheck run` compares the tensors and arrays that the script holds. A tensor is
reported if it differs between ranks and two more conditions hold. It has moved towards the mean of the samples that the
module was given since the last call. It is subtracted from the samples, in every feature that is not clipped. Calls
without gradients (a rollout) of the wrapped module, or of a part of it, count too. The wrapper must then be given the
same samples later. Nothing is reported if a collective is given the statistics, or if the ranks have the same
statistics at a call of the wrapper. Nothing is reported if the statistics are updated more than once between two of
these calls, or if they scale only the targets of the loss. If fewer than three features are known, the samples before
normalisation still have to exist.
ignore: If each rank trains on a different kind of input, and each kind has to be normalised separately.
example:
mean += (x.mean(0) - mean) * len(x) / count    # right: sum, squares and count of x through dist.all_reduce first
loss = criterion(ddp((x - mean) / std), y)
""")
