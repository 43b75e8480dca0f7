"""DDP21x: buffers and other state of modules, which have to be the same on every rank."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP211 buffer-set: error
The module has other buffers on one rank than on another.
why: Buffers are broadcast by position. One buffer fewer on a rank aborts the process inside the backend, without a
Python traceback, or shifts all that follow. (PyTorch docs, DistributedDataParallel, broadcast_buffers.)
fix: Register the same buffers on every rank, before wrapping.
detected: Before DDP's first collective, ranks compare digests of their modules, then the names of buffers.
ignore: If broadcast_buffers=False and the buffer is local on purpose; make it a plain attribute then.
example:
if dist.get_rank() == 0:
    model.register_buffer("best", torch.zeros(()))   # right: on every rank, or a plain Python attribute

DDP212 buffer-order: error
The same buffers are registered in another order on one rank than on another.
why: Buffers are broadcast by position, not by name: rank 0's running mean overwrites another rank's running variance,
without a message where the shapes are equal.
fix: Register buffers in a fixed order, never in that of a set or of a directory listing.
detected: Before DDP's first collective, ranks compare digests of their modules, then the order of the buffers that all
ranks have.
ignore: Never. Buffers are broadcast by position.
example:
for name in {"mean", "variance"}:        # right: for name in ("mean", "variance")
    self.register_buffer(name, torch.zeros(8))

DDP213 buffer-shape-or-dtype: error
A buffer has another shape or dtype on one rank than on another.
why: DDP compares nothing about buffers. The broadcast copies bytes from rank 0: it aborts where sizes differ, and
reinterprets them where only the type does.
fix: Give the buffer the same shape and dtype on every rank: pad it, or keep what is local out of the buffers.
detected: Before DDP's first collective, ranks compare digests of their modules, then the shapes and dtypes of buffers
by name.
ignore: Never while buffers are broadcast.
example:
self.register_buffer("queue", torch.zeros(len(local_data), 8))   # right: a size that all ranks share

DDP214 buffer-value: warning, takes_severity, spreads
A buffer has drifted: its value differs between ranks.
why: With broadcast_buffers=False nothing synchronises buffers, not even at construction, and each rank evaluates
another model; a checkpoint keeps rank 0's alone. With broadcast_buffers=True they are equal only right after a
synchronising forward begins. (PyTorch docs, DistributedDataParallel, broadcast_buffers.)
fix: Give the buffer the same values at the start, and compute it from what all ranks see (SyncBatchNorm, or an
all_reduce of the statistics); or synchronise it before evaluation and saving.
detected: Fingerprints of buffers are compared between ranks after wrapping and after each compared step, where the
wrapper does not broadcast them. `ddpcheck run` also compares the buffers of a criterion outside of the wrapper, and
BatchNorm statistics that are estimated again after training (`update_bn`), where several ranks evaluate a model with
them.
ignore: If each rank is to keep statistics of its own samples, as plain BatchNorm does with broadcast_buffers=False.
explains: DDP304 DDP312; DDP516 if only the loss
reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
example:
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
DistributedDataParallel(model, broadcast_buffers=False)
# right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))

DDP215 buffer-overwritten: warning, takes_severity, spreads
What a rank computed into a buffer is discarded: the broadcast replaces it with rank 0's.
why: DDP broadcasts rank 0's buffers at the start of each synchronising forward. Statistics, counters and queues that
the other ranks gathered are lost; what is left describes rank 0's shard alone. (PyTorch docs, DistributedDataParallel,
broadcast_buffers.)
fix: Reduce the buffer over all ranks yourself (SyncBatchNorm, all_reduce before the update), or accept that it is a
sample from rank 0 and ignore DDP215 for it.
detected: Fingerprints of buffers differ between ranks after a step, and the wrapper broadcasts rank 0's before the next
forward.
ignore: If rank 0's samples are representative enough, as most people accept for the running statistics of BatchNorm.
explains: DDP516 if only the loss
reports: huggingface/pytorch-image-models#110 facebookresearch/moco#41
example:
def forward(self, x):
    self.seen += x.shape[0]              # right: count = torch.tensor(x.shape[0]); dist.all_reduce(count)
    return self.body(x)

DDP216 unregistered-state: warning, takes_severity
A tensor that is a plain attribute of a module, neither parameter nor buffer, differs between ranks.
why: DDP synchronises parameters and buffers. Any other tensor is built on each rank from its own random numbers or
data, stays different, and is missing from the state dict.
fix: Build it in __init__ from the same seed on every rank, or register it with register_buffer before wrapping. If it
changes in training, change it alike on every rank: all_reduce what it is computed from.
detected: Tensors that modules hold as plain attributes are found and fingerprinted on every rank, before the first step
and after each. They are reported if gradients are not those of the global batch, or if they come to differ during
training.
ignore: If the tensor is a cache of the rank's own samples, or is meant to differ.
explains: DDP303 DDP304 DDP312; DDP516 if only the loss
example:
self.projection = torch.randn(8, 8)      # right: self.register_buffer("projection", torch.randn(8, 8))

DDP217 input-statistics: warning
Each rank normalises the inputs by running statistics of its own samples.
why: DDP synchronises parameters and buffers of the wrapped module. A running mean or variance that the script keeps
beside it (an observation normaliser, a scaler that is updated in the loop) is computed from the samples of one rank:
the same sample has another value on each rank, and a checkpoint keeps the statistics of rank 0. (PyTorch docs,
DistributedDataParallel.)
fix: Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before they are added to the
statistics; or keep these in buffers of the wrapped module, as nn.SyncBatchNorm does.
detected: In some calls of forward `ddpcheck run` compares the tensors and arrays that the script holds. It reports one
that differs between ranks, moved towards the mean of the samples passed to the module since the last call, and is
subtracted from them, in every feature that is not clipped. Calls without gradients of the module inside the wrapper, or
of a part of it, count too, as in each step of a rollout, once the wrapper is given the same samples. It reports nothing
if a collective is given the statistics, if the ranks have the same ones when the wrapper is called, if they are updated
more than once between two of these calls, if they scale the targets of the loss only, or, unless the samples before
they are normalised are still there, if fewer than three features are known.
ignore: If each rank trains on inputs of another kind, which have to be normalised by themselves.
example:
mean += (x.mean(0) - mean) * len(x) / count    # right: sum, squares and count of x through dist.all_reduce first
loss = criterion(ddp((x - mean) / std), y)
""")
