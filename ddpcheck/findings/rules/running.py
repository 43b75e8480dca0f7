"""DDP4xx: runs that fail, hang, or pair up the wrong collectives."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP401 rank-raised: error
The target raised an exception on a rank.
why: The rank that raises leaves the others waiting in their next collective. They fail later, with messages such as
'Connection closed by peer' that name the wrong place; the first failure is the one to read.
fix: Fix the exception shown; the ranks listed after it failed as a consequence.
detected: The exit of every rank is watched, and failures are ordered by time. The first exception that is no
consequence of another rank's failure is reported, with its traceback.
ignore: Never.
example:
def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])   # KeyError; right: a key that the batch has

DDP402 hang: error
Ranks wait for something that never comes.
why: A collective ends when every rank has entered it. A rank that took another branch, waits for a lock, loops or is
slow leaves the others waiting until the process group's timeout: 30 minutes by default, 10 with nccl. (PyTorch docs,
init_process_group, timeout.)
fix: Compare the places and stacks of the ranks: bring the rank that is somewhere else into the same collective; where a
rank is at work and only slow, give it more time (--timeout).
detected: No rank has failed, and some did not finish in time. Each rank's log of collectives and its Python stack say
where it stands; ranks that do not wait for others are named as the cause. Where ranks wait in init_process_group,
`ddpcheck run` compares what each has been told: rank, world size and address. `ddpcheck hang` follows who waits for
whom in Flight Recorder dumps through all process groups, to ranks that call nothing any more, devices that do not
complete what peers have completed, ranks that came late, and ranks without a dump.
ignore: If the rank is only slow: give it more time with --timeout or --check-timeout.
reports: Lightning-AI/pytorch-lightning#10947
example:
if dist.get_rank() == 0:
    dist.barrier()                       # right: outside the condition, on every rank

DDP403 collective-mismatch: error
Ranks enter different collectives, or the same one with other shapes or types, at the same point.
why: Collectives of a group are matched by order, not by name. What pairs up wrongly hangs with nccl, aborts or closes
the connection with gloo, or mixes up numbers without a message. (PyTorch docs, torch.distributed: collectives must be
called in the same order on all ranks.)
fix: Call the same collectives in the same order with the same shapes and dtypes on every rank.
detected: Each rank logs its collectives before it makes them, with operation, shape, dtype and line. The logs of each
process group are lined up by number; the first place where they differ, or where the lines part, is reported. `ddpcheck
hang` does the same with Flight Recorder dumps.
ignore: Never, where operations differ. Lines alone are reported only if a rank hangs because of them.
reports: alan-turing-institute/autocast#386
example:
if dist.get_rank() == 0:
    dist.all_reduce(metric)              # the others are in backward already; right: on every rank
loss.backward()

DDP404 rank-died: error
The process of a rank ended without a Python exception: by a signal, an abort, or for lack of memory.
why: There is no traceback, because Python could not write one. A mismatch that aborts inside the backend, a
segmentation fault in an extension, os._exit, and the kernel's out-of-memory killer (SIGKILL) look like this; the other
ranks see a closed connection.
fix: Read the signal and the last output: for SIGKILL use less memory or fewer ranks; for SIGABRT look for a mismatch
(DDP2xx); raise an exception in place of an exit.
detected: The parent sees how the process of the rank ended: by which signal, or with which exit code, without an
exception in Python.
ignore: Never.
example:
os._exit(3)                              # right: raise an exception

DDP405 uneven-iterations: error
Ranks run different numbers of synchronising iterations.
why: Backward under DDP is a collective. A rank with one more batch waits for ranks that have left the loop: it hangs,
or pairs up with the next collective that they enter. (PyTorch docs, DistributedDataParallel.join and
DistributedSampler, drop_last.)
fix: Use DistributedSampler (it pads) or drop_last=True, or enter `with ddp.join():` around the loop.
detected: Some ranks have no samples in a step in which others do, or the loaders of the ranks have different numbers of
batches, and the ranks hang or fail on it.
ignore: Never. Inside `with ddp.join():` ranks do not hang, and nothing is reported.
explains: DDP507
reports: pytorch/pytorch#38174 pytorch/pytorch#33148 microsoft/PyMarlin#80
example:
files = all_files[rank::world_size]      # 5 files on rank 0, 4 on rank 1
for file in files:                       # right: with ddp.join(): around the loop
    step(load(file))

DDP406 marked-ready-twice: error, stops_ddp
A parameter's gradient is marked ready twice in one backward pass.
why: DDP expects one gradient a parameter and iteration. Re-entrant checkpointing around a module that is used more than
once, or a parameter used outside forward, delivers a second: DDP raises 'Expected to mark a variable ready only once',
or, with re-entrant checkpoints, quietly reduces a part (pytorch issue 109191). (PyTorch docs, DistributedDataParallel
and torch.utils.checkpoint.)
fix: Use checkpoint(..., use_reentrant=False), call shared parts inside forward, or set static_graph=True.
detected: Hooks count how often the gradient of each parameter arrives in one backward pass. DDP's own sentence, where
it raises, gives the names.
ignore: With static_graph=True, DDP handles a second arrival.
explains: DDP301 DDP302
reports: huggingface/accelerate#389 microsoft/FocalNet#4 lucidrains/DALLE2-pytorch#225 pytorch/pytorch#109191
example:
h = checkpoint(self.block, x, use_reentrant=True)
h = checkpoint(self.block, h, use_reentrant=True)   # right: use_reentrant=False in both

DDP407 payload-mismatch: error
Ranks put the same number of elements into a collective, packed in another order.
why: The backend sees flat memory of equal size and type, so nothing is raised; numbers that belong to different things
are added up.
fix: Pack in one order on every rank: sort the names before flattening, and send missing entries as zeros.
detected: The step is repeated with the same samples on every rank. The numbers that ranks put into a reduction are then
the same, in another order.
ignore: Never.
example:
flat = torch.cat([losses[name] for name in losses])   # the order of insertion differs by rank
dist.all_reduce(flat)                    # right: for name in sorted(losses)

DDP408 result-not-awaited: error
The result of an asynchronous collective is not waited for, or its tensor is written before that.
why: With async_op=True a collective returns a handle at once, and works on the tensor in a thread or a stream of its
own. What reads the tensor before wait() has returned may find the rank's own numbers, those of all ranks, or a part of
each; what writes it may change what the other ranks get. Nothing is raised. (PyTorch docs, torch.distributed,
synchronous and asynchronous collective operations.)
fix: Keep the handle that the call returns, and call its wait() before anything reads or writes the tensor; or leave out
async_op=True.
detected: The handles of the script's own calls are followed: whether anything asks them before they are freed, where a
variable still refers to the tensor, or an optimizer holds its parameter; and whether the version of a tensor says that
the program has written it before the wait, beside what gloo itself writes (an average). Of views, and of tensors of
which the collective is given a view too, only the first is known; of tensors on a GPU, only the second.
ignore: If nothing ever reads the tensor.
explains: DDP208 DDP301 DDP306 DDP501 if of gradients
example:
for parameter in model.parameters():
    dist.all_reduce(parameter.grad, async_op=True)    # right: works.append(...), and wait() on each of them
    parameter.grad /= dist.get_world_size()
""")
