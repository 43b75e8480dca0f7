"""DDP3xx: gradients and state after a step, against other ranks and a reference."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP301 not-synchronised: error, spreads
A gradient differs between ranks after a backward pass that should have synchronised it.
why: When DDP works, every rank holds bit-identical gradients after backward. A difference means that the reducer did
not average this parameter: its bucket never filled, its hooks are gone, or the inner module was called instead of the
wrapper. Each rank now trains its own model. (PyTorch docs, DistributedDataParallel; notes on DDP.)
fix: Call the wrapper, not ddp.module; leave no_sync before the last backward pass; wrap the module once it is complete;
and fix unused parameters (DDP1xx) first.
detected: After a backward pass that synchronises, the ranks compare each gradient, bit by bit. Correct gradients are
bit-identical, so there is no tolerance. If a rule for the cause applies (DDP101, DDP501, DDP503 and others), that rule
is reported instead.
ignore: If each rank changes its gradients on purpose after they were averaged.
explains: DDP306
reports: pytorch/pytorch#112152 pytorch/pytorch#109191
example:
output = ddp.module(x)                   # right: output = ddp(x)
output.sum().backward()

DDP302 reducer-mismatch: error
DDP's gradients differ from the plain average of the ranks' own gradients.
why: Without the wrapper, the same module on the same samples gives a different average of the gradients. So the
difference comes from the wrapper: a communication hook, a second backward pass that was not reduced, gradients that
existed before the step, or parameters that are paired incorrectly.
fix: Remove the communication hook and check again; on a sharded module, it is set by set_all_reduce_hook. Or call
zero_grad() before each accumulation, reduce in the last backward pass of a step, or give the parameters the same order
on the ranks (DDP202).
detected: ddpcheck runs the same module on the same samples without the wrapper, and averages the gradients with a plain
all-reduce. DDP302 is reported if DDP's gradients are the same on all ranks but differ from this average. A tolerance
for rounding is relative to the ranks' own gradients, before averaging.
ignore: If a communication hook compresses gradients and you accept its rounding. ddpcheck allows the rounding of
bfloat16. For a communication hook that the script registers, `ddpcheck run` reports only a note.
example:
loss = ddp(x).sum()
loss.backward(retain_graph=True)
loss.backward()                          # only the first of the two is reduced; right: (2 * loss).backward()

DDP303 scaled-gradient: error, spreads
Every gradient is the reference gradient times a constant, such as the world size or its inverse.
why: DDP averages gradients over the ranks. If the loss is also divided by the world size, the gradients are divided
twice. If the loss is multiplied by the world size, or contains an all-reduce, the gradients are multiplied. So the
effective learning rate changes with the number of ranks. (PyTorch docs, DistributedDataParallel: gradients are
averaged.)
fix: Make the loss a mean over the local batch and do not scale it by the world size; for a sum, multiply the loss by
the world size.
detected: All gradients differ from the reference by the same factor, within rounding. The reference is a single process
on the global batch, or the plain average of the ranks' own gradients. `ddpcheck run` looks for the causes in the
script: (1) The loss is a mean, and the script divides or multiplies it by the world size. (2) The loss is a sum divided
by a count over all ranks (such as the tokens of the global batch), and is not multiplied by the world size. (3) The
script scales gradients by the world size, in a hook or after they are averaged. (4) The loss covers the features of all
ranks, but its gradient reaches only the rank's own features. (5) A script without a wrapper sums gradients over the
ranks, and does not divide the sum. The steps of some optimizers, such as Adam, do not depend on the scale of gradients.
With such an optimizer, cases 3 and 4 are mostly not reported. Case 5 is then reported only if gradients are clipped.
ignore: If the learning rate was tuned with this factor. But the factor changes with the number of ranks.
explains: quietly DDP302 if a note
reports: neuralmagic/sparseml#135 facebookresearch/3detr#56 ultralytics/ultralytics#18616
example:
loss = cross_entropy(model(x), y) / dist.get_world_size()   # DDP divides already; right: no division

DDP304 batch-coupled: warning
Gradients differ from the single process because samples of a batch influence each other.
why: Under DDP, these see only the rank's own samples: BatchNorm, contrastive losses with negatives from the batch,
batch-wide dice and ranking losses. So the result depends on how the batch is split. This is often accepted, but
training differs from training in one process. (PyTorch docs, SyncBatchNorm.)
fix: Convert with nn.SyncBatchNorm.convert_sync_batchnorm, use GroupNorm or LayerNorm, or gather the batch with a
differentiable all_gather; if coupling within a rank is intended, ignore DDP304.
detected: In a single process, ddpcheck computes the gradients of the global batch and those of each rank's samples. If
they differ, ddpcheck tests whether samples influence each other. Coupling is reported if a module's output for one
sample depends on other samples. It is also reported if a line of code combines samples. To find other couplings,
ddpcheck changes the first layer's outputs for some samples. Coupling is reported if the gradients at these outputs
change for other samples. A second, large change is for losses that use only the hardest or easiest samples: it makes
them select different ones.
ignore: If coupling within a rank is intended, as with plain BatchNorm, local negatives or batch dice. Many people train
this way on purpose. So the finding is a warning, however large the difference is. If the loss only gives samples
different weights, see DDP305.
explains: DDP214 DDP215 if its statistics
reports: pytorch/pytorch#49794 huggingface/accelerate#1154
example:
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
# right: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)

DDP305 loss-normalisation: error
Gradients differ from the single process because the loss is a sum, or a mean over a count that differs between ranks.
why: DDP gives every rank the same weight. So a sum over samples is divided by the world size. A mean over counts that
differ (uneven shards, padding masks, ignore_index, weights of samples) becomes a mean of means: a sample counts more on
a rank with fewer samples. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Sum the local loss, all_reduce the count, and divide by count / world_size on every rank.
detected: DDP gives the gradient of every rank the same weight. DDP305 is reported if the gradient of the global batch
is a weighted sum of the ranks' gradients, and the weights differ between ranks. DDP305 is also reported if the loss
weighs samples by values of the rank's own batch, such as class frequencies. The finding names the count that each rank
divides by, if ddpcheck finds it. `ddpcheck run` measures how much each target counts in the loss. It also reports a
term of the loss that each rank multiplies by its own constant.
ignore: If each rank should have the same weight, however many samples it has. A sum is always an error. A mean of means
is only a warning if its effect is small. In `ddpcheck report`, the effect is small if every gradient is within 5 % of
the global batch's. In a training loop, the effect is large in two cases: (1) In at least half of the steps, an element
of the loss (a sample or token) counts at least twice as much on one rank as on another. (2) In each of at least five
steps, the elements of one rank count more than those of another, always of the same two ranks, and by at least 10 % on
average. Counts that differ by chance, as with padded batches, favour no rank, and many people train this way on
purpose.
reports: pytorch/pytorch#37359 huggingface/transformers#24725
example:
loss = (token_loss * mask).sum() / mask.sum()
# right: total = mask.sum(); dist.all_reduce(total)
#        loss = (token_loss * mask).sum() * dist.get_world_size() / total

DDP306 state-diverged: error, spreads
Parameters, buffers or optimizer state differ between ranks after a step.
why: Nothing makes the ranks equal again: DDP never broadcasts parameters after construction. From this step on, DDP
averages the gradients of different models. A checkpoint keeps only rank 0's state. (PyTorch docs,
DistributedDataParallel: parameters are never broadcast between processes.)
fix: Make each step of the optimizer the same on every rank: draw its random numbers under one seed, give it the same
state and options, and have a closure (LBFGS) return a loss that was reduced over the ranks.
detected: After the optimizer's step, the ranks compare parameters and optimizer state, bit by bit. `ddpcheck run` also
compares copies of the wrapped module outside the wrapper, such as an EMA. It also compares models that the training
loop calls and does not change, such as a frozen teacher.
ignore: If ranks diverge on purpose between averages, as in local SGD. In this case, compare the ranks right after an
average.
explains: DDP516 if only the loss
example:
if loss.item() < threshold:              # decided from local data: some ranks step, others do not
    optimizer.step()                     # right: all_reduce the decision first

DDP307 nothing-compared: error
Nothing was compared: every gradient was zero or missing.
why: A comparison of zeros always passes. Such a check says nothing about the model, so it does not count as a pass.
fix: Give the recipe a batch and a loss with a gradient: no empty mask, no factor of zero, no frozen model.
detected: In every step, the norms of all gradients are zero, in the single process and on the ranks.
ignore: Never. Such a check says nothing about the model.
example:
def loss(model, batch):
    return (model(batch["x"]) * batch["mask"]).sum()   # the mask is all zeros; right: a batch with something in it

DDP308 nondeterministic: warning
The same run twice, from the same state and seed, differs by more than rounding.
why: If two equal runs differ, a difference between DDP and a reference proves nothing. So ddpcheck withholds verdicts
that depend on such a difference. The usual sources are random numbers from an unseeded generator, state kept between
calls, and data that changes from one read to the next. (PyTorch docs, 'Reproducibility'.)
fix: Make model, batch and loss depend only on their arguments and the seed: use torch's default generator, no state
kept between calls, no time or process id; then check again.
detected: ddpcheck runs one step twice on a rank, from the same state and with the same seed. DDP308 is reported if the
gradients differ by more than rounding.
ignore: If the randomness is intended and cannot be seeded. ddpcheck still withholds the verdicts that need equal runs.
example:
def batch(step):
    generator = numpy.random.default_rng()             # right: numpy.random.default_rng(step)
    return torch.from_numpy(generator.normal(size=(8, 4)))

DDP309 collective-without-gradient: error
A collective that autograd does not differentiate is on the path from parameters to the loss.
why: torch.distributed.all_reduce and all_gather are not differentiable. For backward, values from other ranks are
constants. So the gradient lacks the contribution of these values, or stops at the collective. (PyTorch docs,
torch.distributed: autograd through collectives is in torch.distributed.nn.functional.)
fix: Use torch.distributed.nn.functional.all_reduce or all_gather, which autograd differentiates; if a value is only
logged, reduce a detached copy of it.
detected: ddpcheck records the collectives of the forward pass. DDP309 is reported if autograd does not differentiate a
collective between parameters and the loss. The gradient must also differ from the global batch's. `ddpcheck run`
reports a loss that was all-reduced in place and then differentiated. It also reports a loss that uses all gathered
rows, including the rank's own, as constants. It is only a warning if the rank's own rows are replaced by features with
a gradient. Then only the gradient from the other ranks' losses is lost, or, if every rank computes the same loss, the
gradient is too small by a factor of the world size.
ignore: If the values from other ranks should be constants, as negatives of a contrastive loss often are.
explains: DDP303; DDP101 DDP102 if same subjects
reports: mlfoundations/open_clip#616 KevinMusgrave/pytorch-metric-learning#10
example:
dist.all_gather(parts, features)         # parts carry no gradient
everything = torch.cat(parts)            # right: torch.cat(torch.distributed.nn.functional.all_gather(features))

DDP310 gradient-changed-before-reduction: error
A hook, a clip or an optimizer step reads or changes local gradients before they are averaged.
why: Gradient hooks run before DDP averages. A clip in such a hook clips each rank by its own norm. An optimizer step
during backward uses the local gradient. The result differs from that of the global batch, and ranks may diverge.
(PyTorch docs, DistributedDataParallel and register_comm_hook.)
fix: Clip, scale and step after backward has returned; to act inside the reduction, use register_comm_hook.
detected: ddpcheck repeats a step with a loss twice as large. DDP310 is reported if the gradients are not twice as
large. If there are hooks, ddpcheck also compares each rank with a single process on the same samples. DDP310 is
reported if the losses are equal, but the gradients are not. `ddpcheck run` reports clip_grad_norm_ if the gradients are
averaged only after the call. It reports hooks whose factor or mask differs between ranks. A backward hook of a module
that scales gradients is reported only if each rank has its own factor, the same in each step. Hooks that clamp the
elements of a gradient are reported as a warning, even with the same limit on every rank. A hook that steps the
optimizer during backward is reported if parameters then differ between ranks.
ignore: If each rank should clip its own gradients, as some private or robust training does.
explains: DDP302 if same subjects
example:
for p in model.parameters():
    p.register_hook(lambda g: g.clamp(-1, 1))   # right: clip_grad_norm_(model.parameters(), 1.0) after backward

DDP311 saved-tensor-overwritten: error
A tensor that backward needs was overwritten after forward, in place or by a later buffer broadcast.
why: A second forward under DDP broadcasts rank 0's buffers in place. If the first forward saved one of these buffers
for backward, autograd raises an error about an in-place modification. If autograd does not notice the change, it
silently uses the wrong values. (PyTorch docs, DistributedDataParallel, broadcast_buffers; autograd mechanics, 'In-place
correctness checks'.)
fix: Run one forward on the concatenated inputs, clone the buffer before it is used, or pass broadcast_buffers=False and
synchronise buffers yourself.
detected: DDP311 is reported if autograd raises an error about an in-place change in backward. `ddpcheck report` also
runs the step without the wrapper, and reports DDP311 only if this raises no error. The finding names the overwritten
parameters, or the buffers that DDP broadcasts before each forward pass. If no error is raised, ddpcheck compares the
gradients with the average of the ranks' own gradients. A difference is reported as DDP311 only if DDP broadcast buffers
in several forwards before one backward.
ignore: Never. Backward has failed or has used wrong values.
explains: DDP214 DDP215 DDP302 DDP304 DDP312
reports: pytorch/pytorch#22095 pytorch/pytorch#65907 pytorch/pytorch#175024 pytorch/pytorch#110363
example:
real, fake = ddp(a), ddp(b)              # the second call overwrites buffers that the first one saved
(real - fake).mean().backward()          # right: real, fake = ddp(torch.cat([a, b])).chunk(2)

DDP312 unexplained-difference: error
Gradients differ from the single process, and no pattern that ddpcheck knows explains it.
why: The same model on the same samples has different gradients under DDP and in one process. No constant factor, no
weight of samples and no coupling of samples explains the difference. So nothing says that the difference is harmless.
(PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Return the terms of the loss as a dict, and check again. Or compute each term twice: on a batch, and as the mean
over its two halves. If the results differ, the term does not treat samples separately.
detected: The gradients differ from those of a single process on the global batch by more than the measured rounding. No
explanation of DDP303 to DDP310, DDP514 and DDP516 fits. The size of a difference is relative to the norm of the
parameter's gradient on the global batch.
ignore: If you have explained the difference yourself. If you have not, report it: the pattern may deserve a rule.
example:
smoothing = 0.1 if dist.is_initialized() else 0.0   # right: the same loss with and without a process group
loss = cross_entropy(model(x), labels, label_smoothing=smoothing)

DDP314 differs-from-single-process: error
The script's results on several ranks differ from those of a single process on the same samples.
why: The reference for data-parallel training is one process on the global batch. Gradients, evaluation results and
checkpoints should be the same, however many ranks share the samples. A result that differs changes with the number of
ranks, and no error is raised. (PyTorch docs, DistributedDataParallel: if a loss is summed over the samples and not
averaged, the gradient is M times smaller on M nodes than on one node with the whole batch.)
fix: At the line, look for a value of one rank's samples that is used as if it covered all samples: a mean, a maximum or
a normaliser of the rank's batch, a mean of the ranks' results, a division by the size of the whole dataset, a count of
the rank's own steps. Compute it over all ranks, with an all_reduce before it is used (sums and counts for a mean, MAX
for a maximum).
detected: `ddpcheck run --check-parity` runs the script on the ranks, and again in a single process. The single process
gets the batches and the random numbers of all ranks together. ddpcheck compares the gradients of each optimizer step,
the final learning rates and the number of steps. It also compares the numbers that are shown after an evaluation, and
the tensors that torch.save saves. Differences in these are warnings. The ranks together must also get at least three
quarters of the samples of an epoch. If something differs, a third run in another order of samples measures noise. A
difference of up to four times the noise is not reported. The single process acts as rank 0. A difference in gradients
is reported only if the single process has the same gradients when it acts as rank 1. So code that depends on the rank
number is not blamed. If a finding of another rule may explain the difference, DDP314 is not reported. The line of this
check in the report then names the other rule.
ignore: If the value should cover the rank's own samples only, as the negatives of a contrastive loss may.
example:
weights = errors.detach().exp()
loss = (weights / weights.mean() * errors).mean()   # right: all_reduce weights.mean() (AVG) first
""")
