"""DDP5xx: the training loop around the wrapper, and the data that it feeds."""

from __future__ import annotations

from ddpcheck.findings.rules.rule import ERROR, WARNING, Rule

RULES = (
    Rule(
        code="DDP501",
        name="forward-bypassed",
        severity=ERROR,
        summary="Gradients are computed past the wrapper's forward.",
        why=(
            "DDP prepares its reducer in its own forward. ddp.module(x), a parameter used outside forward, "
            "functional_call on the inner module and torch.autograd.grad all leave it out: nothing is reduced, and "
            "nothing is raised. (PyTorch docs, DistributedDataParallel: torch.autograd.grad does not work with it; "
            "call the wrapped module.)"
        ),
        fix="Call the wrapper, and not the module in it; move what uses parameters into the module's forward.",
        example="""\
output = ddp.module(x)                   # right: output = ddp(x)
output.sum().backward()
""",
    ),
    Rule(
        code="DDP502",
        name="no-sync-misuse",
        severity=ERROR,
        summary="no_sync is not entered, never left, or does not enclose the forward pass.",
        why=(
            "no_sync takes effect in forward. Around backward alone it changes nothing; always entered it never "
            "synchronises, and every rank trains its own model; a context that is created and not entered "
            "synchronises in every micro-step. (PyTorch docs, DistributedDataParallel.no_sync: the forward pass "
            "should be inside.)"
        ),
        fix=(
            "Put forward and backward of all micro-steps but the last inside `with ddp.no_sync():`, the last one "
            "outside."
        ),
        example="""\
loss = ddp(x).sum()
with ddp.no_sync():                      # no_sync takes effect in forward
    loss.backward()                      # right: with ddp.no_sync(): ddp(x).sum().backward()
""",
    ),
    Rule(
        code="DDP503",
        name="changed-after-wrapping",
        severity=ERROR,
        summary="A parameter was added, replaced, removed, frozen, unfrozen, cast or moved after wrapping.",
        why=(
            "DDP has put its hooks on the tensors that it found when it was constructed. Replaced tensors have none "
            "(`.double().float()` and `.cpu().cuda()` replace, pytorch issue 104336), frozen ones are waited for, "
            "unfrozen and added ones are never reduced. A forward pass that ties, replaces or deletes layers comes too "
            "late as well. (PyTorch docs, DistributedDataParallel: do not change "
            "parameters after wrapping.)"
        ),
        fix="Finish the module first, wrap it last; wrap again after any such change.",
        example="""\
ddp = DistributedDataParallel(model)
model.head = nn.Linear(8, 3)             # right: replace the head first, then wrap
""",
    ),
    Rule(
        code="DDP504",
        name="stale-optimizer",
        severity=ERROR,
        summary="The optimizer holds tensors that are no longer the module's parameters, or lacks some that are.",
        why=(
            "An optimizer built before the module was cast, moved or extended updates tensors that nobody uses, and "
            "the model does not move. (PyTorch docs, torch.optim: construct optimizers after moving the model.)"
        ),
        fix="Construct the optimizer after the module has its final parameters, device and dtype.",
        example="""\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.head = nn.Linear(8, 3)             # right: replace the head first, then make the optimizer
""",
    ),
    Rule(
        code="DDP505",
        name="duplicate-data",
        severity=ERROR,
        summary="Ranks train on the same samples in the same step.",
        why=(
            "The average of equal gradients is the same gradient: W ranks do the work of one. Usually the loader has "
            "no DistributedSampler, or the sampler was given fixed ranks. (PyTorch docs, DistributedSampler.)"
        ),
        fix="Give the loader a DistributedSampler, or split the data by rank and world size.",
        example="""\
def shard(batch, rank, world_size):
    return batch[: len(batch) // world_size]   # right: return batch[rank::world_size]
""",
    ),
    Rule(
        code="DDP506",
        name="sampler-epoch",
        severity=WARNING,
        summary="The sampler's epoch never changes, so every epoch sees the same order.",
        why=(
            "DistributedSampler shuffles from seed + epoch. Without set_epoch the epoch stays 0. (PyTorch docs, "
            "DistributedSampler: call set_epoch before creating the iterator of each epoch.)"
        ),
        fix="Call sampler.set_epoch(epoch) at the start of every epoch, on every rank.",
    ),
    Rule(
        code="DDP507",
        name="learning-rate",
        severity=ERROR,
        summary="The learning rate differs between ranks, or follows another schedule.",
        why=(
            "Gradients are equal and updates are not, so parameters diverge from this step on. A scheduler that "
            "steps on a local metric (ReduceLROnPlateau) is the usual cause. (PyTorch docs, DistributedDataParallel: "
            "all processes must make the same parameter updates.)"
        ),
        fix="Feed schedulers with values that all ranks share: all_reduce the metric first.",
    ),
    Rule(
        code="DDP508",
        name="step-skipped-on-a-rank",
        severity=ERROR,
        summary="A rank skips a backward pass or an optimizer step that the others make.",
        why=(
            "A guard against NaN or out of memory that decides locally shifts this rank by one: its next step is "
            "averaged with another step of the others, silently, until the counts run out and the job hangs."
        ),
        fix="all_reduce the decision, so that every rank skips or none does.",
        example="""\
if torch.isfinite(loss):                 # right: all_reduce the decision first
    optimizer.step()
""",
    ),
    Rule(
        code="DDP509",
        name="backward-without-forward-pairing",
        severity=ERROR,
        summary="Forward and backward passes of the wrapper do not pair up.",
        why=(
            "The reducer is prepared by a forward and finished by one backward. A second backward of the same "
            "forward is not reduced; a forward whose backward never comes leaves the reducer waiting; the order of "
            "several forwards and backwards has to be the same on all ranks. (PyTorch docs, DistributedDataParallel.)"
        ),
        fix=(
            "Call forward once and backward once a step; add losses up before backward; use no_grad for forwards "
            "that do not train."
        ),
        example="""\
one, other = ddp(a).mean(), ddp(b).mean()
one.backward()
other.backward()                         # right: (one + other).backward()
""",
    ),
    Rule(
        code="DDP510",
        name="shared-augmentation-seed",
        severity=WARNING,
        summary="Ranks draw the same random numbers for augmentation or dropout.",
        why=(
            "One seed for all ranks gives each the same crops, flips, noise and dropout masks: less variety than the "
            "size of the global batch suggests."
        ),
        fix="Seed model construction equally and data workers with seed + rank.",
        example="""\
def forward(self, x):
    torch.manual_seed(0)                 # right: seed once, before the first step, with seed + rank
    return self.head(self.dropout(x))
""",
    ),
    Rule(
        code="DDP511",
        name="mode-differs",
        severity=ERROR,
        summary="In a step, the model is in train mode on one rank and in eval mode on another.",
        why=(
            "Dropout and BatchNorm then compute other functions, and BatchNorm statistics move on some ranks only. "
            "DDP averages the gradients without a word."
        ),
        fix=(
            "Call train() and eval() on every rank at the same places; evaluate on all ranks, or go back to train() "
            "after it."
        ),
    ),
    Rule(
        code="DDP512",
        name="checkpoint-race",
        severity=ERROR,
        summary="Several ranks write the same checkpoint, or one reads it before it is complete.",
        why=(
            "Writers overwrite each other, and a reader finds half a file; without map_location every rank loads "
            "onto rank 0's device. (PyTorch tutorial, 'Getting Started with Distributed Data Parallel', save and "
            "load checkpoints.)"
        ),
        fix="Save on rank 0 only, barrier before others read, and load with map_location.",
    ),
    Rule(
        code="DDP513",
        name="static-graph-violated",
        severity=ERROR,
        summary="static_graph=True is set, and the set of used parameters or their order changes.",
        why=(
            "With static_graph DDP records in the first iteration how often each gradient arrives, and relies on it. "
            "A graph that changes hangs, raises, or leaves gradients unsynchronised. (PyTorch docs, "
            "DistributedDataParallel, static_graph.)"
        ),
        fix="Remove static_graph=True and use find_unused_parameters=True, or make every step use the same parameters.",
    ),
    Rule(
        code="DDP514",
        name="accumulation-scale",
        severity=ERROR,
        summary="Accumulated gradients are not scaled by the number of micro-steps, or of what is in each.",
        why=(
            "backward adds up. Without division the step grows with the number of micro-steps; with a division that "
            "does not match the last, shorter accumulation it is too small. A mean over micro-batches that hold "
            "unequal numbers of tokens is a mean of means: tokens of the shorter ones count more. (huggingface/"
            "transformers#34191 mended this in one trainer.)"
        ),
        fix=(
            "Divide each micro-step's loss by the number of micro-steps of this accumulation; where they hold unequal "
            "numbers of tokens, divide sums over tokens by the number of tokens in all of them."
        ),
        example="""\
for part in batch.split(4):
    loss(ddp, part).backward()           # right: (loss(ddp, part) / len(batch.split(4))).backward()
""",
    ),
    Rule(
        code="DDP515",
        name="values-changed-after-wrapping",
        severity=ERROR,
        summary="Parameter values were changed after wrapping by something else than the optimizer, on some ranks.",
        why=(
            "DDP broadcasts at construction only. A checkpoint loaded, weights re-initialised, pruned or averaged on "
            "rank 0 alone stays on rank 0. (PyTorch docs, DistributedDataParallel: parameters are never broadcast "
            "after construction.)"
        ),
        fix="Make the change on every rank from the same data, or broadcast the parameters after it.",
        example="""\
ddp = DistributedDataParallel(model)
if dist.get_rank() == 0:
    model.load_state_dict(checkpoint)    # right: load before wrapping, or on every rank
""",
    ),
    Rule(
        code="DDP516",
        name="rank-dependent-program-data",
        severity=ERROR,
        summary="Data that the program derives (label map, split, vocabulary, order) differs between ranks.",
        why=(
            "Class 3 on one rank is class 5 on another, or a validation sample on one is a training sample on the "
            "next. Shapes agree, so nothing is raised. Sets, directory listings and unseeded shuffles are the usual "
            "sources."
        ),
        fix=(
            "Sort what comes from sets and directories, seed shuffles equally, or compute it on rank 0 and broadcast "
            "it."
        ),
    ),
    Rule(
        code="DDP517",
        name="gradients-discarded",
        severity=ERROR,
        summary="Gradients are zeroed or replaced before an optimizer step has used them.",
        why=(
            "A zero_grad between backward and step, or in every micro-step of an accumulation, throws away what was "
            "computed and reduced; the model trains on a part of the batch, or not at all."
        ),
        fix="Call zero_grad right after step, or right before the first micro-step, and nowhere else.",
        example="""\
for part in parts:
    optimizer.zero_grad()                # right: once, before the loop
    loss(ddp, part).backward()
""",
    ),
    Rule(
        code="DDP518",
        name="unreduced-metric",
        severity=WARNING,
        summary="A metric that is logged or decides something is the value of one rank's shard.",
        why=(
            "Rank 0's loss or accuracy describes 1/W of the data, and early stopping or best-model decisions made "
            "from it differ between ranks. DDP reduces gradients and nothing else."
        ),
        fix="all_reduce sums and counts over the ranks, then divide.",
    ),
    Rule(
        code="DDP519",
        name="samples-left-out",
        severity=WARNING,
        summary="Samples of the global batch are on no rank.",
        why=(
            "What no shard holds is not trained on. A remainder that is cut off shrinks the batch by up to world size "
            "- 1 samples; a split by fixed sizes loses the same samples in every step. (PyTorch docs, "
            "DistributedSampler, drop_last.)"
        ),
        fix="Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.",
        example="""\
def shard(batch, rank, world_size):
    return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
""",
    ),
)
