"""DDP21x: buffers and other module state that must be equal on all ranks."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP211 buffer-set: error
The set of buffers differs between ranks.
why: DDP broadcasts buffers by position. If a rank has one buffer fewer, all later buffers are paired with wrong ones.
Or the process aborts inside the backend, without a Python traceback. (PyTorch docs, DistributedDataParallel,
broadcast_buffers.)
fix: Register the same buffers on every rank, before wrapping.
detected: Before DDP's first collective, the ranks compare the names of their buffers.
ignore: If broadcast_buffers=False is set and the buffer is local on purpose. Make the buffer a plain attribute then.
example:
if dist.get_rank() == 0:
    model.register_buffer("best", torch.zeros(()))   # right: on every rank, or a plain Python attribute

DDP212 buffer-order: error
The same buffers are registered in a different order on different ranks.
why: DDP broadcasts buffers by position, not by name. For example, rank 0's running mean then overwrites another rank's
running variance. Nothing is raised if the shapes are equal.
fix: Register buffers in a fixed order, never in the order of a set or of a directory listing.
detected: Before DDP's first collective, the ranks compare the order of the buffers that all ranks have.
ignore: Never. DDP broadcasts buffers by position.
example:
for name in {"mean", "variance"}:        # right: for name in ("mean", "variance")
    self.register_buffer(name, torch.zeros(8))

DDP213 buffer-shape-or-dtype: error
The shape or dtype of a buffer differs between ranks.
why: DDP does not compare buffers. The broadcast copies bytes from rank 0, and aborts if a rank's buffer is smaller. The
end of a larger buffer keeps its old values. If only the dtype differs, the other ranks read these bytes as wrong
numbers.
fix: Give the buffer the same shape and dtype on every rank: pad it, or keep local data out of the buffers.
detected: Before DDP's first collective, the ranks compare the shapes and dtypes of buffers with the same name.
ignore: Never while buffers are broadcast.
example:
self.register_buffer("queue", torch.zeros(len(local_data), 8))   # right: a size that all ranks share

DDP214 buffer-value: warning, takes_severity, spreads
A buffer has drifted: its value differs between ranks.
why: With broadcast_buffers=False nothing synchronises buffers, not even at construction. Each rank then evaluates a
different model, and a checkpoint keeps only rank 0's buffers. With broadcast_buffers=True, buffers are equal only right
after DDP has broadcast them, at the start of forward. (PyTorch docs, DistributedDataParallel, broadcast_buffers.)
fix: Give the buffer the same initial values, and compute it from the data of all ranks (SyncBatchNorm, or an all_reduce
of the statistics); or synchronise it before evaluation and saving.
detected: If the wrapper does not broadcast buffers, the ranks compare the values of their buffers, bit by bit. They do
this after wrapping and after each checked step. `ddpcheck run` also compares the buffers of loss modules outside the
wrapper. If several ranks evaluate a model after `update_bn`, `ddpcheck run` compares their BatchNorm statistics.
ignore: If each rank should keep its own statistics, as plain BatchNorm does with broadcast_buffers=False.
explains: DDP304 DDP312; DDP516 if only the loss
reports: pytorch/pytorch#13711 open-mmlab/mmdetection#4582 open-mmlab/mmpose#998
example:
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
DistributedDataParallel(model, broadcast_buffers=False)
# right: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))

DDP215 buffer-overwritten: warning, takes_severity, spreads
A buffer that a rank computed is discarded: the broadcast replaces it with rank 0's.
why: In each step, DDP broadcasts rank 0's buffers at the start of forward. Statistics, counters and queues of the other
ranks are lost. The buffer then describes rank 0's samples only. (PyTorch docs, DistributedDataParallel,
broadcast_buffers.)
fix: Reduce the buffer over all ranks yourself (SyncBatchNorm, or all_reduce before the update), or accept that the
buffer describes rank 0's samples only, and ignore DDP215 for it.
detected: After each step, the ranks compare the values of their buffers. A buffer is reported if its values differ, and
the wrapper broadcasts rank 0's values before the next forward.
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
why: DDP synchronises only parameters and buffers. If each rank builds another tensor from its own random numbers or
data, the values stay different. The tensor is also missing from the state dict.
fix: Build it in __init__ from the same seed on every rank, or register it with register_buffer before wrapping. If it
changes during training, make the same change on every rank: all_reduce the values that it is computed from.
detected: Before the first step and after each step, the ranks compare the tensors that modules hold as plain
attributes. A tensor is reported if it differs between ranks. A tensor that the first step makes is reported only if the
gradients also differ from those of the global batch.
ignore: If the tensor is a cache of the rank's own samples, or differs on purpose.
explains: DDP303 DDP304 DDP312; DDP516 if only the loss
example:
self.projection = torch.randn(8, 8)      # right: self.register_buffer("projection", torch.randn(8, 8))

DDP217 input-statistics: warning
Each rank normalises its inputs with a running mean or variance of only its own samples.
why: DDP synchronises only the parameters and buffers of the wrapped module. A script may keep a running mean or
variance outside the module (an observation normaliser, a scaler that is updated in the loop). These statistics come
from the samples of one rank. The same sample then has a different value on each rank, and a checkpoint keeps the
statistics of rank 0. (PyTorch docs, DistributedDataParallel.)
fix: Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before adding them to the statistics;
or keep the statistics in buffers of the wrapped module, as nn.SyncBatchNorm does.
detected: In some calls of forward, `ddpcheck run` compares the tensors and arrays that the script holds. A tensor is
reported under three conditions. The tensor differs between ranks. The tensor has moved towards the mean of the module's
input since the previous call. The tensor is subtracted from this input. Nothing is reported if a collective is given
the statistics, or if they are equal on all ranks at one of these calls. Nothing is reported if the statistics scale
only the targets of the loss. Nothing is reported if the script updates the statistics more than once between two calls.
ignore: If each rank trains on a different kind of input, and each kind has to be normalised separately.
example:
mean += (x.mean(0) - mean) * len(x) / count    # right: sum, squares and count of x through dist.all_reduce first
loss = criterion(ddp((x - mean) / std), y)
""")
