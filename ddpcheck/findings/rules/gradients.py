"""DDP3xx: gradients, and the state after a step, against other ranks and against a reference."""

from ddpcheck.findings.rules.rule import rules

RULES = rules("""
DDP301 not-synchronised: error, spreads
A gradient differs between ranks after a backward pass that should have synchronised it.
why: When DDP works, every rank holds bit-identical gradients after backward. A difference means that the reducer did
not average this parameter: its bucket never filled, its hooks are gone, or the inner module was called. Each rank now
trains its own model. (PyTorch docs, DistributedDataParallel; notes on DDP.)
fix: Call the wrapper, and not ddp.module; leave no_sync before the last backward; wrap after the module is complete;
and fix unused parameters (DDP1xx) first.
detected: After a synchronising backward, a fingerprint of each gradient is compared between ranks. Right gradients are
bit-identical, so there is no tolerance. Causes with a rule of their own (DDP101, DDP501, DDP503 and others) are looked
for first.
ignore: If gradients are changed per rank on purpose after they were averaged.
explains: DDP306
reports: pytorch/pytorch#112152 pytorch/pytorch#109191
example:
output = ddp.module(x)                   # right: output = ddp(x)
output.sum().backward()

DDP302 reducer-mismatch: error
DDP's gradients differ from the plain average of the ranks' own gradients.
why: The same module on the same shards, without the wrapper and averaged by an all-reduce, gives something else. So the
difference comes from the wrapper: a communication hook, a second backward that was not reduced, gradients that were
already there, or parameters that are paired wrongly.
fix: Take the communication hook off and check again (of shards, set_all_reduce_hook); call zero_grad() before each
accumulation; reduce in the last backward pass of a step; compare parameter order on the ranks (DDP202).
detected: The same module runs on the same shards without the wrapper, and its gradients are averaged by a plain
all-reduce. What DDP left is not that average, although all ranks have the same. Errors are relative to the root mean
square of the norms of the ranks' own gradients.
ignore: With a compressing communication hook whose rounding you accept; ddpcheck allows what bfloat16 loses. `ddpcheck
run` tells of a hook of the script's own as a note.
example:
loss = ddp(x).sum()
loss.backward(retain_graph=True)
loss.backward()                          # only the first of the two is reduced; right: (2 * loss).backward()

DDP303 scaled-gradient: error, spreads
Every gradient is the reference's times a constant, such as the world size or one over it.
why: DDP averages over ranks. A loss that is divided by the world size by hand is divided twice; one that is multiplied
by it, or an all-reduce inside the loss, multiplies. The effective learning rate changes with the number of ranks.
(PyTorch docs, DistributedDataParallel: gradients are averaged.)
fix: Make the loss a mean over the local batch and do not scale it by the world size; for a sum, multiply the loss by
the world size.
detected: The gradients are those of the reference times one factor, to within rounding, and the factor is one that the
world size explains. `ddpcheck run` compares the loss with the mean that it was made of, looks for a sum that is divided
by a number which an all_reduce has summed over the ranks, and that neither the loss nor a hook scales back, at
averaged gradients that are divided by the world size, or multiplied by it, before the optimizer uses them, and at a
mean over the features of all ranks whose gradient goes on to the rank's own only. Without a wrapper it compares what
backward has left on all ranks with what the optimizer uses, or a clip is given: it is a finding if that is the sum, in
three steps that were compared, and the loss is a mean of weight 1. An optimizer whose steps do not depend on the scale,
such as Adam, has one only after a clip, as a warning. Errors are relative to the root mean
square of the norms of the ranks' own gradients.
ignore: If the learning rate was tuned with this factor; it changes when the number of ranks does.
explains: quietly DDP302 if a note
reports: neuralmagic/sparseml#135 facebookresearch/3detr#56 ultralytics/ultralytics#18616
example:
loss = cross_entropy(model(x), y) / dist.get_world_size()   # DDP divides already; right: no division

DDP304 batch-coupled: warning
Gradients differ from the single process because samples of a batch influence each other.
why: BatchNorm, contrastive losses with negatives from the batch, batch-wide dice and ranking losses see only the local
shard under DDP, so the result depends on how the batch is split. Often this is accepted; it is not the same training as
on one process. (PyTorch docs, SyncBatchNorm.)
fix: Convert with nn.SyncBatchNorm.convert_sync_batchnorm, use GroupNorm or LayerNorm, or gather the batch with a
differentiable all_gather; if per-rank coupling is meant, ignore DDP304.
detected: Each term of the loss is differentiated on the global batch and on each shard in a single process. Coupling is
reported if it was shown: a module whose output for one sample depends on others, a line at which samples meet, or
gradients of some samples that change with others: a little, or a thousand times and negated, so that a loss of the
samples with the largest or smallest losses chooses others. Errors are relative to the norm of the global batch's
gradient, or of others in its layer where it is small beside them.
ignore: If coupling within a rank is meant: plain BatchNorm, local negatives, batch dice. Many train so on purpose, so
it is a warning, however large. What only weighs samples is DDP305.
explains: DDP214 DDP215 if its statistics
reports: pytorch/pytorch#49794 huggingface/accelerate#1154
example:
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
# right: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)

DDP305 loss-normalisation: error
Gradients differ from the single process because the loss is a sum, or a mean over a count that differs between ranks.
why: DDP gives every rank the same weight. A sum over samples is divided by the world size. A mean over unequal counts
(uneven shards, padding masks, ignore_index, weights) is then a mean of means: samples on the rank with fewer of them
count more. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Sum the local loss, all_reduce the count, and divide by count / world_size on every rank.
detected: The gradients of the shards, weighted, add up to that of the global batch, and the weights are not those of
DDP; or each sample has another weight, while nothing that the model computes for one depends on the others. The counts
that ranks divide by are found in the loss or the batch. The wrapper and `ddpcheck run` measure what weight each target
has; the latter also by what constant each rank multiplies a term of its loss, and whether it keeps a number of its own
from step to step. Errors are relative to the norm of the global batch's gradient, or of others in its layer where it is
small beside them.
ignore: If each rank is to have the same weight whatever it holds. A mean of means is a warning where its effect is
small: in a report, where every gradient is within 5 % of the global batch's; in a watched loop, where an element counts
less than twice as much as another in half of the steps that were measured, and no rank is always ahead (in each of five
steps or more, by 10 % on average). Counts that differ by chance, as of padded batches, prefer no rank, and many train
so on purpose. A sum is always an error.
reports: pytorch/pytorch#37359 huggingface/transformers#24725
example:
loss = (token_loss * mask).sum() / mask.sum()
# right: total = mask.sum(); dist.all_reduce(total)
#        loss = (token_loss * mask).sum() * dist.get_world_size() / total

DDP306 state-diverged: error, spreads
Parameters, buffers or optimizer state differ between ranks after a step.
why: Nothing brings the ranks together again: DDP never broadcasts parameters after construction. From here on the
averaged gradients belong to no model, and a checkpoint keeps rank 0's alone. (PyTorch docs, DistributedDataParallel:
parameters are never broadcast between processes.)
fix: Make each step of the optimizer the same on every rank: draw its random numbers under one seed, give it the same
state and options, and have a closure (LBFGS) return a loss that was reduced over the ranks.
detected: Fingerprints of parameters and optimizer state are compared after the optimizer's step. `ddpcheck run` also
compares models beside the wrapper: copies of it or of a part of it, such as an EMA, and others that the training loop
calls and does not change, such as a frozen teacher.
ignore: If ranks drift on purpose between averages, as in local SGD; compare at the averaging steps then.
explains: DDP516 if only the loss
example:
if loss.item() < threshold:              # decided from local data: some ranks step, others do not
    optimizer.step()                     # right: all_reduce the decision first

DDP307 nothing-compared: error
Nothing was compared: every gradient was zero or missing.
why: A comparison of zeros always passes. Such a check says nothing about the model, so it does not count as a pass.
fix: Give the recipe a batch and a loss with a gradient: no empty mask, no factor of zero, no frozen model.
detected: The norms of all gradients, of the single process and of the ranks, are zero in every step.
ignore: Never. The check says nothing then.
example:
def loss(model, batch):
    return (model(batch["x"]) * batch["mask"]).sum()   # the mask is all zeros; right: a batch with something in it

DDP308 nondeterministic: warning
The same run twice, from the same state and seed, differs by more than rounding.
why: Then a difference between DDP and a reference proves nothing, and verdicts that rest on one are withheld. The usual
sources are random numbers from an unseeded generator, state kept between calls, and data that changes from one reading
to the next. (PyTorch docs, 'Reproducibility'.)
fix: Make model, batch and loss functions of their arguments and the seed: use torch's default generator, no state kept
between calls, no time or process id; then check again.
detected: One step is run twice on a rank from the same state with the same seed, and the gradients differ by more than
rounding.
ignore: If the randomness is meant and cannot be seeded; the checks that it withholds stay undone.
example:
def batch(step):
    generator = numpy.random.default_rng()             # right: numpy.random.default_rng(step)
    return torch.from_numpy(generator.normal(size=(8, 4)))

DDP309 collective-without-gradient: error
A collective that autograd does not see stands on the way from parameters to the loss.
why: torch.distributed.all_reduce and all_gather are not differentiable: what comes from other ranks is a constant for
backward, so the gradient lacks its share, or stops there. (PyTorch docs, torch.distributed: autograd through
collectives is in torch.distributed.nn.functional.)
fix: Use torch.distributed.nn.functional.all_reduce or all_gather, which autograd differentiates; reduce what is only
logged on a detached copy.
detected: The collectives of the forward pass are recorded. One that autograd does not differentiate stands between
parameters and the loss, and the gradient is not that of the global batch. `ddpcheck run` reports a loss that was
all-reduced in place and then differentiated, and one that multiplies by the gathered rows of all ranks, or takes
distances from them, as constants, the rank's own among them. It also compares the gradient that arrives at what is
gathered, on each rank, with what goes on to the rank's own features, which are put back or come through a function of
the script's: where ranks have other losses, that lacks what the others ask. If they have the same loss, all that is
wrong is a factor, and it is a warning (DDP303, where it is a function).
ignore: If the values from other ranks are to be constants, as negatives of a contrastive loss often are.
explains: DDP303; DDP101 DDP102 if same subjects
reports: mlfoundations/open_clip#616 KevinMusgrave/pytorch-metric-learning#10
example:
dist.all_gather(parts, features)         # parts carry no gradient
everything = torch.cat(parts)            # right: torch.cat(torch.distributed.nn.functional.all_gather(features))

DDP310 gradient-changed-before-reduction: error
A hook, a clip or an optimizer step reads or changes local gradients before they are averaged.
why: Gradient hooks run before DDP averages. A clip there clips each rank by its own norm, and an optimizer step in
backward uses the local gradient: the result is not that of the global batch, and ranks may diverge. (PyTorch docs,
DistributedDataParallel and register_comm_hook.)
fix: Clip, scale and step after backward has returned; to act inside the reduction, use register_comm_hook.
detected: A loss twice as large does not give gradients twice as large, or the gradients on the ranks are wrong although
their losses are right. The hooks on the way of the gradients are named. `ddpcheck run` watches clip_grad_norm_, and
whether the gradients are averaged after it; and in some steps what hooks on parameters make of a gradient: a factor or
a mask that is not the same on all ranks, or elements that are cut off at a limit (a warning). Of full backward hooks of
modules it is told if they multiply by a factor of the rank's own, the same one in each step. An optimizer's step that a
hook of a parameter makes while backward runs is reported, at the line that registers the hook, if parameters differ
between the ranks after it.
ignore: If each rank is to clip its own gradients, as some private or robust training does.
explains: DDP302 if same subjects
example:
for p in model.parameters():
    p.register_hook(lambda g: g.clamp(-1, 1))   # right: clip_grad_norm_(model.parameters(), 1.0) after backward

DDP311 saved-tensor-overwritten: error
What backward needs was overwritten after forward, in place or by a later buffer broadcast.
why: A second forward under DDP broadcasts rank 0's buffers in place. When the first forward saved one of them for
backward, autograd raises about an in-place modification, or, where versions are not counted, uses the wrong values.
(PyTorch docs, DistributedDataParallel, broadcast_buffers; autograd mechanics, 'In-place correctness checks'.)
fix: Run one forward on the concatenated inputs, clone the buffer before it is used, or pass broadcast_buffers=False and
synchronise buffers yourself.
detected: Autograd raises in backward about an in-place change, and the same step without the wrapper does not raise.
The overwritten parameters, or the buffers that DDP broadcasts before each forward pass, are named. Where nothing is
raised, the gradients are not the average of the ranks' own.
ignore: Never. Backward has failed or has used wrong values.
explains: DDP214 DDP215 DDP302 DDP304 DDP312
reports: pytorch/pytorch#22095 pytorch/pytorch#65907 pytorch/pytorch#175024 pytorch/pytorch#110363
example:
real, fake = ddp(a), ddp(b)              # the second call overwrites buffers that the first one saved
(real - fake).mean().backward()          # right: real, fake = ddp(torch.cat([a, b])).chunk(2)

DDP312 unexplained-difference: error
Gradients differ from the single process, and no pattern that ddpcheck knows explains it.
why: The same model on the same samples gives another gradient under DDP than in one process. It is no constant factor,
no weight of samples, and no coupling of samples that could be shown, so nothing says that it is harmless. (PyTorch
docs, DistributedDataParallel: gradients are averaged over processes.)
fix: Compare the loss of a batch with the mean of the losses of its two halves, term by term: the first that differs
depends on more than its own samples. Return the terms of the loss as a dict, and check again.
detected: The gradients differ from those of the single process by more than measured rounding, and no explanation of
DDP303 to DDP310, DDP514 and DDP516 fits. Errors are relative to the norm of the global batch's gradient, or of others
in its layer where it is small beside them.
ignore: If you have explained the difference yourself. Report it otherwise: the pattern may deserve a rule.
example:
smoothing = 0.1 if dist.is_initialized() else 0.0   # right: the same loss with and without a process group
loss = cross_entropy(model(x), labels, label_smoothing=smoothing)

DDP314 differs-from-single-process: error
The script computes something else on several ranks than in a single process on the same samples.
why: One process on the global batch is the reference for data-parallel training: gradients, numbers of an evaluation
and checkpoints are the same, however many ranks share the samples. What differs changes with the number of ranks, and
nothing raises. (PyTorch docs, DistributedDataParallel: if a loss is summed over the samples and not averaged, the
gradient is M times smaller on M nodes than on one node with the whole batch.)
fix: At the line, look for a value of one rank's samples that stands for those of all: a mean, a maximum or a normaliser
of the rank's batch, a mean of the ranks' results, a division by the size of the whole set, a count of the rank's own
steps. Compute it over all ranks, by an all_reduce before it is used (sums and counts for a mean, MAX for a maximum).
detected: `ddpcheck run --check-parity` runs the script on the ranks, and once more in a single process that gets the
batches and the random numbers of all ranks together. Compared are the gradients of each optimizer step, where learning
rates end, the number of steps, whether the ranks together have three quarters of the samples of an epoch, numbers that
are shown after an evaluation, and tensors that are saved with torch.save.
If something differs, a third run, with the samples in another order, other random numbers and another clock, measures
noise: a difference of up to four times that, or of 1e-5, is not reported. A difference in gradients is reported only if
a single process that takes itself for rank 1 has the same gradients as rank 0. Numbers that are shown or saved are a
warning. Not reported beside a finding of another rule: then the check line says what differs.
ignore: If the value is meant to be that of a rank's own samples, as the negatives of a contrastive loss may be.
example:
weights = errors.detach().exp()
loss = (weights / weights.mean() * errors).mean()   # right: all_reduce weights.mean() (AVG) first
""")
