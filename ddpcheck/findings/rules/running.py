"""DDP4xx: runs that fail, hang, or pair up the wrong collectives."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP401 rank-raised: error
The checked script or recipe raised an exception on a rank.
why: The rank that raises leaves the others waiting in their next collective. The others fail later, with messages such
as 'Connection closed by peer' that name the wrong place. The first failure is the one to read.
fix: Fix the exception shown. The ranks that are listed below it failed as a consequence.
detected: ddpcheck records when each rank ends. It reports the first exception that is not a consequence of another
rank's failure, with its traceback.
ignore: Never.
example:
def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])   # KeyError; right: a key that the batch has

DDP402 hang: error
Ranks wait for something that never arrives.
why: A collective ends when every rank has entered it. A rank may take a different branch, wait for a lock, loop or be
slow. The others then wait until the process group's timeout: 30 minutes by default, 10 with nccl. (PyTorch docs,
init_process_group, timeout.)
fix: Compare the places and stacks of the ranks, and bring the rank that is elsewhere into the same collective; if a
rank is working and only slow, give it more time (--timeout).
detected: DDP402 is reported if no rank has failed and some ranks do not finish in time. ddpcheck compares the Python
stacks of the ranks and their logs of collectives. Ranks that wait for no other rank are named as the cause. If ranks
wait in init_process_group, `ddpcheck run` compares the rank, world size and address of each. `ddpcheck hang` reads
Flight Recorder dumps, and finds out which rank waits for which in all process groups. It names the rank for which the
others wait. It also says why: this rank stopped calling collectives, came late, left no dump, or its GPU has not
completed a collective that others have completed.
ignore: If the rank is only slow. Give it more time with --timeout or --check-timeout.
reports: Lightning-AI/pytorch-lightning#10947
example:
if dist.get_rank() == 0:
    dist.barrier()                       # right: outside the condition, on every rank

DDP403 collective-mismatch: error
Ranks enter different collectives, or the same one with different shapes or dtypes, at the same point.
why: Collectives of a group are matched by order, not by name. With nccl, a wrong pair hangs. With gloo, it aborts the
process or closes the connection. A wrong pair may also silently mix up numbers. (PyTorch docs, torch.distributed:
collectives must be called in the same order on all ranks.)
fix: Call the same collectives in the same order with the same shapes and dtypes on every rank.
detected: Each rank logs every collective before the call, with its operation, shape, dtype and line. ddpcheck aligns
the logs of each process group by sequence number. It reports the first collective that differs. `ddpcheck hang` does
the same with Flight Recorder dumps.
ignore: Never, if the operations differ. A difference in lines alone is reported only if a rank hangs because of it.
reports: alan-turing-institute/autocast#386
example:
if dist.get_rank() == 0:
    dist.all_reduce(metric)              # the others are in backward already; right: on every rank
loss.backward()

DDP404 rank-died: error
The process of a rank ended without a Python exception: by a signal, an abort, or for lack of memory.
why: There is no traceback, because Python could not write one. Causes are a mismatch that aborts inside the backend, a
segmentation fault in an extension, os._exit, and the kernel's out-of-memory killer (SIGKILL). The other ranks see a
closed connection.
fix: Read the signal and the last output: for SIGKILL use less memory or fewer ranks; for SIGABRT look for a mismatch
(DDP2xx); raise an exception instead of exiting.
detected: DDP404 is reported if the process of a rank ends by a signal or with an exit code, but without a Python
exception.
ignore: Never.
example:
os._exit(3)                              # right: raise an exception

DDP405 uneven-iterations: error
Ranks run different numbers of synchronising iterations.
why: Backward under DDP is a collective. A rank with one more batch waits for ranks that have left the loop. This rank
hangs, or its collective is paired with a later one of the other ranks. (PyTorch docs, DistributedDataParallel.join and
DistributedSampler, drop_last.)
fix: Use DistributedSampler (it pads) or drop_last=True, or enter `with ddp.join():` around the loop.
detected: ddpcheck compares which ranks have samples in a step, and how many batches the loader of each rank has. A
difference is reported if ranks hang or fail because of it.
ignore: Never. Inside `with ddp.join():` ranks do not hang, and nothing is reported.
explains: DDP507
reports: pytorch/pytorch#38174 pytorch/pytorch#33148 microsoft/PyMarlin#80
example:
files = all_files[rank::world_size]      # 5 files on rank 0, 4 on rank 1
for file in files:                       # right: with ddp.join(): around the loop
    step(load(file))

DDP406 marked-ready-twice: error, stops_ddp
A parameter's gradient is marked ready twice in one backward pass.
why: DDP expects one gradient per parameter and iteration. A second one arrives if a re-entrant checkpoint encloses a
module that is used more than once, or if a parameter is used outside forward. DDP then raises 'Expected to mark a
variable ready only once'. With re-entrant checkpoints, DDP may instead raise nothing and average only a part of the
gradient (pytorch issue 109191). (PyTorch docs, DistributedDataParallel and torch.utils.checkpoint.)
fix: Use checkpoint(..., use_reentrant=False), call shared modules inside forward, or set static_graph=True.
detected: ddpcheck counts how often the gradient of each parameter arrives in one backward pass. If DDP raises, the
names of the parameters come from its message.
ignore: If static_graph=True is set: DDP then handles a second arrival.
explains: DDP301 DDP302
reports: huggingface/accelerate#389 microsoft/FocalNet#4 lucidrains/DALLE2-pytorch#225 pytorch/pytorch#109191
example:
h = checkpoint(self.block, x, use_reentrant=True)
h = checkpoint(self.block, h, use_reentrant=True)   # right: use_reentrant=False in both

DDP407 payload-mismatch: error
Ranks put the same number of elements into a collective, packed in another order.
why: The backend sees flat memory of equal size and dtype. So nothing is raised, and unrelated numbers are added up.
fix: Pack in one order on every rank: sort the names before flattening, and send missing entries as zeros.
detected: `ddpcheck report` repeats the step with the same samples on every rank. DDP407 is reported if the ranks then
put the same numbers into a reduction, but in a different order.
ignore: Never.
example:
flat = torch.cat([losses[name] for name in losses])   # the order of insertion differs by rank
dist.all_reduce(flat)                    # right: for name in sorted(losses)

DDP408 result-not-awaited: error
No code waits for an asynchronous collective, or its tensor is written before wait() returns.
why: With async_op=True a collective returns a handle immediately, and works on the tensor in its own thread or stream.
Code that reads the tensor before wait() has returned may find the rank's own numbers, those of all ranks, or a mixture.
Code that writes the tensor before that may change the numbers that other ranks receive. Nothing is raised. (PyTorch
docs, torch.distributed, synchronous and asynchronous collective operations.)
fix: Keep the handle that the call returns, and call its wait() before anything reads or writes the tensor; or leave out
async_op=True.
detected: ddpcheck follows the handles that the script's own calls return. It reports a handle that is freed and was
never used, if its tensor is still needed. A tensor is needed if a variable refers to it, or if an optimizer uses it as
a gradient. It also reports a tensor that the program writes before wait() returns. For tensors on a GPU, unused handles
are not reported. For views, writes are not reported.
ignore: If nothing ever reads the tensor.
explains: DDP208 DDP301 DDP306 DDP501 if of gradients
example:
for parameter in model.parameters():
    dist.all_reduce(parameter.grad, async_op=True)    # right: works.append(...), and wait() on each of them
    parameter.grad /= dist.get_world_size()
""")
