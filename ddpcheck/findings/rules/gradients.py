"""DDP3xx: gradients, and the state after a step, against other ranks and against a reference."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP301 not-synchronised: error, spreads
A gradient differs between ranks after a backward pass that should have synchronised it.
why: When DDP works, every rank holds bit-identical gradients after backward. A difference means that the reducer did
not average this parameter: its bucket never filled, its hooks are gone, or the inner module was called. Each rank now
trains its own model. (PyTorch docs, DistributedDataParallel; notes on DDP.)
fix: Call the wrapper, not ddp.module; leave no_sync before the last backward pass; wrap the module once it is complete;
and fix unused parameters (DDP1xx) first.
detected: After a backward pass that synchronises, a fingerprint of each gradient is compared between ranks. Correct
gradients are bit-identical, so there is no tolerance. Causes that have their own rule (DDP101, DDP501, DDP503 and
others) are checked first.
ignore: If gradients are changed per rank on purpose after they were averaged.
explains: DDP306
reports: pytorch/pytorch#112152 pytorch/pytorch#109191
example:
output = ddp.module(x)                   # right: output = ddp(x)
output.sum().backward()

DDP302 reducer-mismatch: error
DDP's gradients differ from the plain average of the ranks' own gradients.
why: The same module on the same shards, without the wrapper and averaged by an all-reduce, gives different gradients.
So the difference comes from the wrapper: a communication hook, a second backward pass that was not reduced, gradients
that existed before the step, or parameters that are paired incorrectly.
fix: Remove the communication hook and check again (of a sharded module: set_all_reduce_hook); call zero_grad() before
each accumulation; reduce in the last backward pass of a step; compare the parameter order on the ranks (DDP202).
detected: The same module runs on the same shards without the wrapper, and its gradients are averaged by a plain
all-reduce. The gradients that DDP left differ from that average, although they are the same on all ranks. Errors are
relative to the root mean square of the norms of the ranks' own gradients.
ignore: With a compressing communication hook whose rounding you accept; ddpcheck allows the rounding of bfloat16.
`ddpcheck run` reports a hook that the script registers as a note.
example:
loss = ddp(x).sum()
loss.backward(retain_graph=True)
loss.backward()                          # only the first of the two is reduced; right: (2 * loss).backward()

DDP303 scaled-gradient: error, spreads
Every gradient is the reference gradient times a constant, such as the world size or its inverse.
why: DDP averages gradients over the ranks. A loss that is also divided by the world size is divided twice; a loss that
is multiplied by it, or an all-reduce inside the loss, multiplies the gradients. The effective learning rate changes
with the number of ranks. (PyTorch docs, DistributedDataParallel: gradients are averaged.)
fix: Make the loss a mean over the local batch and do not scale it by the world size; for a sum, multiply the loss by
the world size.
detected: The gradients equal those of the reference times one factor, to within rounding, and the world size explains
the factor. `ddpcheck run` checks the loss against the mean that it was computed from; a sum that is divided by a number
which an all_reduce has summed over the ranks, if neither the loss nor a hook scales it back; averaged gradients that
are divided or multiplied by the world size before the optimizer uses them; and a mean over the features of all ranks
whose gradient reaches the rank's own features only. Without a wrapper, it compares the gradients that backward leaves
on all ranks with those that the optimizer uses, or that are clipped: a sum of them in three compared steps is reported
if the loss is a mean of weight 1. If the optimizer's steps do not depend on the scale, as in Adam, it is reported only
if gradients are clipped, as a warning. Errors are relative to the root mean square of the norms of the ranks' own
gradients.
ignore: If the learning rate was tuned with this factor; the factor changes with the number of ranks.
explains: quietly DDP302 if a note
reports: neuralmagic/sparseml#135 facebookresearch/3detr#56 ultralytics/ultralytics#18616
example:
loss = cross_entropy(model(x), y) / dist.get_world_size()   # DDP divides already; right: no division

DDP304 batch-coupled: warning
Gradients differ from the single process because samples of a batch influence each other.
why: BatchNorm, contrastive losses with negatives from the batch, batch-wide dice and ranking losses see only the local
shard under DDP, so the result depends on how the batch is split. This is often accepted, but training differs from that
on one process. (PyTorch docs, SyncBatchNorm.)
fix: Convert with nn.SyncBatchNorm.convert_sync_batchnorm, use GroupNorm or LayerNorm, or gather the batch with a
differentiable all_gather; if coupling within a rank is intended, ignore DDP304.
detected: Each term of the loss is differentiated on the global batch and on each shard in a single process. Coupling is
reported if one of these shows it: a module whose output for one sample depends on other samples, a line that combines
samples, or gradients of some samples that change when the model's outputs for others do. The outputs are changed
slightly, and a thousandfold and negated, so that a loss over the samples with the largest or smallest losses selects
different ones. Errors are relative to the norm of the global batch's gradient, or, if that is small, of other gradients
in its layer.
ignore: If coupling within a rank is intended: plain BatchNorm, local negatives, batch dice. Many train this way on
purpose, so the finding is a warning, however large the difference. If the loss only weighs samples, see DDP305.
explains: DDP214 DDP215 if its statistics
reports: pytorch/pytorch#49794 huggingface/accelerate#1154
example:
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
# right: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)

DDP305 loss-normalisation: error
Gradients differ from the single process because the loss is a sum, or a mean over a count that differs between ranks.
why: DDP gives every rank the same weight. A sum over samples is divided by the world size. A mean over unequal counts
(uneven shards, padding masks, ignore_index, weights) becomes a mean of means: samples count more on a rank that has
fewer of them. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Sum the local loss, all_reduce the count, and divide by count / world_size on every rank.
detected: The gradients of the shards, weighted, add up to that of the global batch, and the weights differ from those
of DDP; or samples have different weights, and no output of the model for one sample depends on other samples. The
counts that ranks divide by are looked up in the loss or the batch. The wrapper and `ddpcheck run` measure the weight of
each target. `ddpcheck run` also measures the constant by which each rank multiplies a term of its loss, and whether a
rank keeps a different constant from step to step. Errors are relative to the norm of the global batch's gradient, or,
if that is small, of other gradients in its layer.
ignore: If each rank should have the same weight, however many samples it has. A mean of means is a warning if its
effect is small: in a report, if every gradient is within 5 % of the global batch's; in a watched loop, if an element
counts less than twice as much as another in half of the measured steps, and no rank is always ahead (in each of five or
more steps, and by 10 % on average). Counts that differ by chance, as with padded batches, favour no rank, and many
train this way on purpose. A sum is always an error.
reports: pytorch/pytorch#37359 huggingface/transformers#24725
example:
loss = (token_loss * mask).sum() / mask.sum()
# right: total = mask.sum(); dist.all_reduce(total)
#        loss = (token_loss * mask).sum() * dist.get_world_size() / total

DDP306 state-diverged: error, spreads
Parameters, buffers or optimizer state differ between ranks after a step.
why: Nothing makes the ranks equal again: DDP never broadcasts parameters after construction. From this step on, the
averaged gradients belong to no model, and a checkpoint keeps only rank 0's state. (PyTorch docs,
DistributedDataParallel: parameters are never broadcast between processes.)
fix: Make each step of the optimizer the same on every rank: draw its random numbers under one seed, give it the same
state and options, and have a closure (LBFGS) return a loss that was reduced over the ranks.
detected: Fingerprints of parameters and optimizer state are compared after the optimizer's step. `ddpcheck run` also
compares models beside the wrapper: copies of the wrapped module or of a part of it, such as an EMA, and models that the
training loop calls and does not change, such as a frozen teacher.
ignore: If ranks diverge on purpose between averages, as in local SGD; then compare at the averaging steps.
explains: DDP516 if only the loss
example:
if loss.item() < threshold:              # decided from local data: some ranks step, others do not
    optimizer.step()                     # right: all_reduce the decision first

DDP307 nothing-compared: error
Nothing was compared: every gradient was zero or missing.
why: A comparison of zeros always passes. Such a check says nothing about the model, so it does not count as a pass.
fix: Give the recipe a batch and a loss with a gradient: no empty mask, no factor of zero, no frozen model.
detected: The norms of all gradients, of the single process and of the ranks, are zero in every step.
ignore: Never. Such a check says nothing about the model.
example:
def loss(model, batch):
    return (model(batch["x"]) * batch["mask"]).sum()   # the mask is all zeros; right: a batch with something in it

DDP308 nondeterministic: warning
The same run twice, from the same state and seed, differs by more than rounding.
why: If two equal runs differ, a difference between DDP and a reference proves nothing, so verdicts that depend on one
are withheld. The usual sources are random numbers from an unseeded generator, state kept between calls, and data that
changes from one read to the next. (PyTorch docs, 'Reproducibility'.)
fix: Make model, batch and loss functions of their arguments and the seed: use torch's default generator, no state kept
between calls, no time or process id; then check again.
detected: One step is run twice on a rank, from the same state and with the same seed, and the gradients differ by more
than rounding.
ignore: If the randomness is intended and cannot be seeded; the checks that it withholds are not made then.
example:
def batch(step):
    generator = numpy.random.default_rng()             # right: numpy.random.default_rng(step)
    return torch.from_numpy(generator.normal(size=(8, 4)))

DDP309 collective-without-gradient: error
A collective that autograd does not differentiate is on the path from parameters to the loss.
why: torch.distributed.all_reduce and all_gather are not differentiable: values from other ranks are constants for
backward, so the gradient lacks their share, or stops there. (PyTorch docs, torch.distributed: autograd through
collectives is in torch.distributed.nn.functional.)
fix: Use torch.distributed.nn.functional.all_reduce or all_gather, which autograd differentiates; reduce values that are
only logged on a detached copy.
detected: The collectives of the forward pass are recorded. One that autograd does not differentiate is between
parameters and the loss, and the gradient differs from that of the global batch. `ddpcheck run` reports a loss that was
all-reduced in place and then differentiated, and a loss that treats the gathered rows of all ranks, the rank's own
included, as constants in a product or a distance. It also compares, on each rank, the gradient of the gathered rows
with the gradient that reaches the rank's own features, whether these are put back among the gathered rows or come from
a function of the script. If ranks have different losses, the latter lacks the contributions of the other ranks. If all
ranks have the same loss, only a factor is wrong, and the finding is a warning (DDP303, if a function gathers).
ignore: If the values from other ranks should be constants, as negatives of a contrastive loss often are.
explains: DDP303; DDP101 DDP102 if same subjects
reports: mlfoundations/open_clip#616 KevinMusgrave/pytorch-metric-learning#10
example:
dist.all_gather(parts, features)         # parts carry no gradient
everything = torch.cat(parts)            # right: torch.cat(torch.distributed.nn.functional.all_gather(features))

DDP310 gradient-changed-before-reduction: error
A hook, a clip or an optimizer step reads or changes local gradients before they are averaged.
why: Gradient hooks run before DDP averages. A clip there clips each rank by its own norm, and an optimizer step in
backward uses the local gradient: the result differs from that of the global batch, and ranks may diverge. (PyTorch
docs, DistributedDataParallel and register_comm_hook.)
fix: Clip, scale and step after backward has returned; to act inside the reduction, use register_comm_hook.
detected: A loss twice as large does not give gradients twice as large, or the gradients on the ranks are wrong although
their losses are right. The hooks on the path of the gradients are named. `ddpcheck run` checks whether the gradients
are averaged after clip_grad_norm_, and, in some steps, how hooks on parameters change a gradient: by a factor or a mask
that differs between ranks, or by a limit on elements (a warning). A full backward hook of a module is reported if it
multiplies by a factor that differs between ranks and is the same in each step. An optimizer step that a hook of a
parameter makes during backward is reported, at the line that registers the hook, if parameters differ between the ranks
after it.
ignore: If each rank should clip its own gradients, as some private or robust training does.
explains: DDP302 if same subjects
example:
for p in model.parameters():
    p.register_hook(lambda g: g.clamp(-1, 1))   # right: clip_grad_norm_(model.parameters(), 1.0) after backward

DDP311 saved-tensor-overwritten: error
A tensor that backward needs was overwritten after forward, in place or by a later buffer broadcast.
why: A second forward under DDP broadcasts rank 0's buffers in place. If the first forward saved one of them for
backward, autograd raises about an in-place modification, or, if versions are not counted, uses the wrong values.
(PyTorch docs, DistributedDataParallel, broadcast_buffers; autograd mechanics, 'In-place correctness checks'.)
fix: Run one forward on the concatenated inputs, clone the buffer before it is used, or pass broadcast_buffers=False and
synchronise buffers yourself.
detected: Autograd raises in backward about an in-place change, and the same step without the wrapper does not raise.
The overwritten parameters, or the buffers that DDP broadcasts before each forward pass, are named. If nothing is
raised, the gradients differ from the average of the ranks' own.
ignore: Never. Backward has failed or has used wrong values.
explains: DDP214 DDP215 DDP302 DDP304 DDP312
reports: pytorch/pytorch#22095 pytorch/pytorch#65907 pytorch/pytorch#175024 pytorch/pytorch#110363
example:
real, fake = ddp(a), ddp(b)              # the second call overwrites buffers that the first one saved
(real - fake).mean().backward()          # right: real, fake = ddp(torch.cat([a, b])).chunk(2)

DDP312 unexplained-difference: error
Gradients differ from the single process, and no pattern that ddpcheck knows explains it.
why: The same model on the same samples has different gradients under DDP and in one process. No constant factor, no
weight of samples and no coupling of samples explains the difference, so nothing says that it is harmless. (PyTorch
docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Compare the loss of a batch with the mean of the losses of its two halves, term by term: the first term that
differs depends on more than its own samples. Return the terms of the loss as a dict, and check again.
detected: The gradients differ from those of the single process by more than measured rounding, and no explanation of
DDP303 to DDP310, DDP514 and DDP516 fits. Errors are relative to the norm of the global batch's gradient, or, if that is
small, of other gradients in its layer.
ignore: If you have explained the difference yourself. If you have not, report it: the pattern may deserve a rule.
example:
smoothing = 0.1 if dist.is_initialized() else 0.0   # right: the same loss with and without a process group
loss = cross_entropy(model(x), labels, label_smoothing=smoothing)

DDP314 differs-from-single-process: error
The script's results on several ranks differ from those of a single process on the same samples.
why: One process on the global batch is the reference for data-parallel training: gradients, evaluation results and
checkpoints are the same, however many ranks share the samples. A result that differs changes with the number of ranks,
and nothing raises. (PyTorch docs, DistributedDataParallel: if a loss is summed over the samples and not averaged, the
gradient is M times smaller on M nodes than on one node with the whole batch.)
fix: At the line, look for a value of one rank's samples that is used as if it covered all samples: a mean, a maximum or
a normaliser of the rank's batch, a mean of the ranks' results, a division by the size of the whole dataset, a count of
the rank's own steps. Compute it over all ranks, with an all_reduce before it is used (sums and counts for a mean, MAX
for a maximum).
detected: `ddpcheck run --check-parity` runs the script on the ranks, and again in a single process that gets the
batches and the random numbers of all ranks together. It compares the gradients of each optimizer step, the final
learning rates, the number of steps, whether the ranks together have three quarters of the samples of an epoch, numbers
that are shown after an evaluation, and tensors that are saved with torch.save. If something differs, a third run, with
another order of samples, other random numbers and another clock, measures noise: a difference of up to four times the
noise, or of 1e-5, is not reported. A difference in gradients is reported only if a single process that acts as rank 1
has the same gradients as rank 0. Differences in numbers that are shown or saved are warnings. If another rule has a
finding, a difference is not reported; the check line names it.
ignore: If the value should cover the rank's own samples only, as the negatives of a contrastive loss may.
example:
weights = errors.detach().exp()
loss = (weights / weights.mean() * errors).mean()   # right: all_reduce weights.mean() (AVG) first
""")
