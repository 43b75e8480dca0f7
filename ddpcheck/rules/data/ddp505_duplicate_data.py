"""DDP505 duplicate-data: error

Ranks train on the same samples in the same step.

Why: The average of equal gradients is the same gradient, so all ranks together do the work of one. Usually the loader
    has no DistributedSampler, or the sampler has the same rank number in every process. (PyTorch docs,
    DistributedSampler.)
Fix: Give the loader a DistributedSampler, split data by rank and world size, or use seed + rank as the seed of the
    generator that draws the samples.
Detected: ddpcheck compares the samples of the ranks in each step: a recipe's shards, samples from data loaders, and
    inputs of forward. Equal samples are reported. Without a wrapper, ddpcheck compares the gradients that the ranks
    all_reduce. Three cases are reported as warnings: (1) The ranks' parts of a dataset overlap within an epoch. (2) A
    rank gets the samples of another rank some steps later. (3) The targets of a loss are the same on every rank, but
    the inputs of forward differ. Some ranks should share samples: with tensor, context or sequence parallelism, a
    loss over all ranks, or repeated augmentation. If ddpcheck recognises this, nothing is reported.
Ignore: If all ranks should see the same samples, for example with different augmentation or in a part of the loss.
Line: The line that constructs the sampler or the loader. If inputs of forward, targets or gradients are compared:
    the line that seeds or draws the random numbers that select samples; else the call of forward, the line that
    computes the loss, or the optimizer step. `ddpcheck report` names no line.
Checks: report parity; run data; repro shards
Repeats: Data
Explains: DDP303 DDP304 DDP305 DDP312
Reports: PatrickHua/SimSiam#16 Lightning-AI/pytorch-lightning#7813 coqui-ai/Trainer#144
Example:
    def shard(batch, rank, world_size):
        return batch[: len(batch) // world_size]   # right: return batch[rank::world_size]
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ddpcheck.findings import wording
from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import EvaluationInputs, Inputs, LoaderPass, LossDifferentiated
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_steps, new_finding, plural
from ddpcheck.trace.data import (
    Loader,
    all_inputs_differ,
    are_repeated_on_ranks,
    batches_by_step,
    common_steps,
    describe_unused_samples,
    finding_on_loader,
    first_training_indices,
    group_equal_ranks,
    is_complete_pass,
    is_repeated_by_workers,
    line_of_selection,
    share_some_inputs,
    shared_by_ranks,
)
from ddpcheck.trace.replicas import aligned
from ddpcheck.trace.unwrapped_params import MIN_TAKEN_STEPS, Steps

SHARED_PER_REPEAT = 4  # independent draws share about twice as many samples as they repeat
FEWEST_TARGETS = 3  # steps with equal targets on every rank
FEWEST_TARGET_BITS = 24.0  # total information in these targets, to rule out chance
MOST_STEPS_BEHIND = 8  # longest delay of a rank that is tried
FEWEST_STEPS_BEHIND = 2  # steps in which a rank gets the samples of another rank's later step
FEWEST_REUSED_STEPS = 3  # steps on samples that another rank used before
SPLIT_STREAM = (
    "Split the stream in the dataset's __iter__ by rank and world size, and by get_worker_info() if the loader has "
    "workers; if it shuffles before the split, use the same seed on every rank."
)


def judge_overlap(loader: Loader) -> list[Finding]:
    """DDP505: samples that several ranks train on in the same step or epoch."""
    first = loader.first
    if len(first) < 2 or not all(p.indices for p in first) or not loader.has_same_data or are_repeated_on_ranks(first):
        return []
    size = min(len(p.indices) for p in first)
    lists = [tuple(p.indices[:size]) for p in first]
    by_list = wording.group_by(range(len(lists)), lambda i: lists[i])
    groups = [[loader.ranks[i] for i in same] for order, same in by_list.items() if len(same) > 1 < len(set(order))]
    if not groups:
        return _judge_random_overlap(first, lists)
    largest, *more = sorted(groups, key=len, reverse=True)
    return finding_on_loader(
        "DDP505",
        first[0],
        f"{wording.format_ranks(largest).capitalize()} take the same samples in the same order from the loader, so "
        "together they do the work of one.",
        ranks=() if sum(map(len, groups)) == len(lists) else sorted(itertools.chain(*groups)),
        evidence=[
            f"the first samples on each of them: {first_training_indices(lists[list(loader.ranks).index(largest[0])])}",
            *_mention_groups(more),
            _describe_share(first[0]),
        ],
    )


def _judge_random_overlap(first: Sequence[LoaderPass], lists: Sequence[Sequence[int]]) -> list[Finding]:
    """Detect ranks that draw their parts of a dataset independently, so that parts overlap."""
    whole, size = all(map(is_complete_pass, first)), len(lists[0])
    if not whole:  # e.g. an endless sampler: parts are disjoint until all samples are taken
        size = min(size, first[0].size // len(first))
        lists = [indices[:size] for indices in lists]
    repeats = max(len(indices) - len(set(indices)) for indices in lists)  # duplicates that fill up a batch
    shared = shared_by_ranks(first, lists, size)
    if any(p.replaces for p in first) or shared <= SHARED_PER_REPEAT * repeats or _repeats_evenly(lists):
        return []
    by_epoch = len({p.epoch for p in first}) > 1 and min(p.epoch for p in first) >= 0
    parts = "it shuffles all of the data, and each rank takes a part."
    in_others = ", and their samplers are in other epochs" if by_epoch else ""
    return finding_on_loader(
        "DDP505",
        first[0],
        f"The ranks share {shared} of the {'' if whole else 'first '}{size} samples that each takes from the loader"
        f"{' in an epoch' * whole}, each in a different order{in_others}.",
        line=next((p.epoch_set_at for p in first if p.epoch_set_at), None) if by_epoch else None,
        severity=Severity.WARNING,
        evidence=[
            f"the epoch of the sampler: {'; '.join(wording.group_by_value([p.epoch for p in first]))}" * by_epoch,
            *(f"rank {rank} begins with samples {first_training_indices(part)}" for rank, part in enumerate(lists[:3])),
            _describe_share(first[0]),
        ],
        fix=f"Tell the sampler the same epoch on every rank: {parts}"
        if by_epoch
        else f"Give the sampler the same seed on every rank: {parts}"
        if size < first[0].size and first[0].has_epoch
        else "",
    )


def _mention_groups(groups: Sequence[Sequence[int]]) -> list[str]:
    return (
        [f"likewise {wording.join_names([*map(wording.format_ranks, groups)])}, with different samples"]
        if groups
        else []
    )


def _repeats_evenly(lists: Sequence[Sequence[int]]) -> bool:
    """Return True if each sample repeats equally often on neighbouring ranks: repeated augmentation."""
    lengths = [len(list(group)) for _, group in itertools.groupby(itertools.chain(*zip(*lists, strict=True)))]
    return len(set(lengths[1:-1])) == 1 and lengths[1] > 1


def judge_later_overlap(loader: Loader) -> list[Finding]:
    """DDP505: samples disjoint between ranks in the first epoch and shared in later epochs."""
    epochs, first = list(zip(*loader.passes, strict=False)), loader.first[0]
    if len(loader.passes) < 2 or len(epochs) < 2 or not loader.has_same_data or not all(map(_exhausts_shares, epochs)):
        return []
    if any(p.size != first.size or p.epoch != epoch[0].epoch for epoch in epochs for p in epoch):
        return []
    size, union = len(first.indices), {index for p in epochs[0] for index in p.indices}
    shared = [shared_by_ranks(epoch, [p.indices for p in epoch], size) for epoch in epochs[1:]]
    if len(union) <= (size - 1) * len(epochs[0]) or not all(shared):
        return []
    second = {index for p in epochs[1] for index in p.indices}
    return finding_on_loader(
        "DDP505",
        first,
        f"In the first epoch the ranks take disjoint parts of the dataset; in the next one they share {shared[0]} of "
        f"the {size} samples that each takes, and {first.size - len(second)} of {first.size} are on no rank: the order "
        "is not drawn from the same random numbers on every rank.",
        severity=Severity.WARNING,
        evidence=[
            *(
                f"rank {rank} begins it with samples {first_training_indices(p.indices)}"
                for rank, p in enumerate(epochs[1][:3])
            ),
            _describe_share(first),
        ],
        fix="Gather or reduce over all ranks the values by which the sampler orders or weights samples (such as "
        "losses), or broadcast its order, before each rank takes its part.",
    )


def _exhausts_shares(epoch: Sequence[LoaderPass]) -> bool:
    """Return True if each rank exhausted its share of the dataset without duplicates."""
    are_complete = all(loader.indices and is_complete_pass(loader) and not loader.replaces for loader in epoch)
    are_distinct = all(len(set(loader.indices)) == len(loader.indices) == len(epoch[0].indices) for loader in epoch)
    return are_complete and are_distinct and (len(epoch[0].indices) - 1) * len(epoch) < epoch[0].size


def judge_inputs(
    inputs: Mapping[int, Sequence[Inputs]], draws: Mapping[int, Sequence[StepDraw]] = MappingProxyType({})
) -> list[Finding]:
    """DDP505: forward inputs that are equal on several ranks and change between steps.

    The inputs may be equal in all steps, only in the first steps, or only in the last steps (all ranks loaded rank 0's
    generator state). Arguments are by rank.
    """
    steps = [step for step in zip(*inputs.values(), strict=False) if len({call.step for call in step}) == 1]
    samples = {rank: [tuple(sorted(step[index].samples)) for step in steps] for index, rank in enumerate(inputs)}
    groups = group_equal_ranks(samples, len(steps))
    equal_at_end = not groups
    if equal_at_end:
        groups = group_equal_ranks({rank: rank_samples[::-1] for rank, rank_samples in samples.items()}, len(steps))
    if not groups:
        return []
    (equal_ranks, count), *more = groups
    differing_steps = steps[::-1][count:] if equal_at_end else steps[count:]
    line, forward_location = line_of_selection([draws.get(rank, ()) for rank in equal_ranks]), steps[0][0].location
    whole, all_ranks = len(equal_ranks) == len(inputs), sorted(rank for ranks, _ in groups for rank in ranks)
    who = "Every rank's forward pass is" if whole else f"The forward passes of {wording.format_ranks(equal_ranks)} are"
    part = "all" if not differing_steps else "the last" if equal_at_end else "the first"
    when = f"{part} {count} steps that were compared"
    differ = [
        f"{'until' if equal_at_end else 'from'} step {step[0].step}{'' if equal_at_end else ' on'} they differ"
        for step in differing_steps
    ]
    return wording.new_finding(
        "DDP505",
        ("forward",),
        f"{who} given the same samples, in {when}; so together {'the' if whole else 'these'} ranks do the work of one.",
        ranks=() if len(all_ranks) == len(inputs) else all_ranks,
        location=line or forward_location,
        severity=Severity.WARNING if differing_steps else None,  # may be a warm-up
        evidence=[
            f"their bits are equal on {'all' if whole else 'these'} ranks, and change from step to step",
            *differ[:1],
            *_mention_groups([ranks for ranks, _ in more]),
        ],
        related={"forward called": forward_location},
        fix="Seed with seed + rank, and restore the state of the generator from a checkpoint of each rank."
        * equal_at_end,
    )


def _describe_share(loader: LoaderPass) -> str:
    return f"each rank takes {len(loader.indices)} of {wording.plural(loader.size, 'sample')} ({loader.sampler})"


def judge_same_targets(
    losses: Sequence[Sequence[LossDifferentiated]],
    inputs: Sequence[Sequence[Inputs]],
    draws: Sequence[Sequence[StepDraw]],
) -> list[Finding]:
    """DDP505: ranks with equal targets but different inputs in each compared step.

    Either the ranks augment the same samples differently, or they draw the same noise (the targets) for different
    samples. An input tensor may be equal, if another input (e.g. a hidden state) differs. Arguments are by rank.
    """
    by_pass = [{(loss.step, loss.number): loss for loss in rank_losses if loss.wrappers} for rank_losses in losses]
    passes = aligned(by_pass) if len(by_pass) > 1 else []
    if len({len(loss.targets) for step_losses in passes for loss in step_losses}) > 1:
        return []
    for steps in common_steps(inputs) if passes else ():
        rows = {len(call.samples) for step in steps for call in step}
        elements = {size for step in steps for call in step for _, size in call.parts}
        differ = any(len({call.samples for call in step}) > 1 for step in steps)
        part = differ and share_some_inputs(steps, FEWEST_TARGETS)
        for index in range(len(passes[0][0].targets)) if part or all_inputs_differ(steps) else ():
            targets = [[loss.targets[index] for loss in step_losses] for step_losses in passes]
            first = [group[0] for group in targets]
            usable = [t for t in first if t.bits and (t.rows in rows or t.elements in elements)]
            distinct = {target.digest: target.bits for target in usable}
            if (
                any(len({target.digest for target in group}) > 1 for group in targets)
                or not all(target.bits for target in first)
                or 2 * len(usable) < len(first)  # few steps have a shorter last batch of an epoch
                or len(distinct) < (FEWEST_TARGETS if part else max(len(usable), FEWEST_TARGETS))
                or sum(distinct.values()) < FEWEST_TARGET_BITS
            ):
                continue
            loss_at, forward_location = passes[0][0].computed_at or passes[0][0].location, steps[0][0].location
            noise = usable[0].rows < usable[0].elements and usable[0].elements in elements  # as in diffusion training
            return new_finding(
                "DDP505",
                ("targets",),
                "The loss of every rank has the same targets in the same order, in all "
                f"{len(first)} steps that were compared, and forward is given "
                + (
                    "a tensor that is also the same on each rank: the ranks take the same samples."
                    if part and not noise
                    else "different inputs on each rank: "
                    + ("either the targets are the same noise on every rank, or " if noise else "")
                    + "the ranks take the same samples, and each augments them separately."
                ),
                location=line_of_selection(draws) or loss_at or forward_location,
                evidence=["the targets are bit-identical on all ranks, and change from step to step"],
                related={"loss computed": loss_at, "forward called": forward_location},
                severity=Severity.WARNING,
            )
    return []


def judge_streams(
    draws: Mapping[int, Sequence[StepDraw]],
    inputs: Mapping[int, Sequence[Inputs]],
    evaluated: Mapping[int, Sequence[EvaluationInputs]],
) -> list[Finding]:
    """DDP505: rank that trains on samples that another rank has drawn for evaluation.

    A finding requires that the samples have the same order on both ranks, and that both random generators once had the
    same state: evaluation has moved one generator ahead. Arguments are by rank of a wrapper's group.
    """
    drawn: dict[tuple[int, ...], tuple[int, int]] = {}  # samples -> (first rank to evaluate them, position)
    for peer in inputs:
        for index, batch in enumerate(evaluated.get(peer, ())):
            drawn.setdefault(tuple(sorted(batch.samples)), (peer, index))
    samples = batches_by_step(inputs)
    for rank, batches in samples.items() if drawn else ():
        seen = {step: drawn[batch] for step, batch in batches.items() if batch in drawn}
        peer = next((peer for peer, _ in seen.values()), rank)
        order = {step: i for step, (r, i) in seen.items() if r == peer and batches[step] != samples[peer].get(step)}
        in_order = all(a < b for a, b in itertools.pairwise(order.values()))
        if peer == rank or len(order) < FEWEST_REUSED_STEPS or not in_order:
            continue
        if (line := _shared_seed_line(draws.get(rank, ()), draws.get(peer, ()))) is None:
            continue
        return new_finding(
            "DDP505",
            ("forward",),
            f"Rank {rank} trains on samples that rank {peer} has drawn before: both choose them by the same random "
            "numbers, and one rank has drawn more of these.",
            ranks=(rank,),
            location=line,
            evidence=[
                f"rank {peer} has evaluated on the samples of rank {rank} in {format_steps(order)}, in the same order"
            ],
            related={"forward called": inputs[rank][0].location},
            fix="Seed the generator by which samples are chosen with seed + rank.",
        )
    return []


def judge_delayed_samples(inputs: Mapping[int, Sequence[Inputs]]) -> list[Finding]:
    """DDP505: rank that gets another rank's samples a fixed number of steps later.

    Not reported if there are only about as many batches as ranks: ranks may take turns with the same batches.
    `inputs`: by rank of a wrapper's group.
    """
    samples = batches_by_step(inputs)
    if len({batch for batches in samples.values() for batch in batches.values()}) <= len(samples) + 1:
        return []
    for (rank, batches), (peer, peer_batches) in itertools.permutations(samples.items(), 2):
        for lag in range(1, MOST_STEPS_BEHIND + 1):
            steps = [step for step in batches if step + lag in peer_batches]
            if len(steps) >= FEWEST_STEPS_BEHIND and all(batches[step] == peer_batches[step + lag] for step in steps):
                return new_finding(
                    "DDP505",
                    ("forward",),
                    f"Rank {rank} gets the samples that rank {peer} gets {plural(lag, 'step')} later: the ranks "
                    "iterate over the same samples, one behind the other.",
                    location=inputs[rank][0].location,
                    severity=Severity.WARNING,
                    evidence=[f"in {format_steps(steps)}"],
                    fix="In each step, move every rank forward in the data by the global batch: batch size times "
                    "world size.",
                )
    return []


def _shared_seed_line(draws: Sequence[StepDraw], other_draws: Sequence[StepDraw]) -> Location | None:
    """Return where a generator with equal states is seeded or, if unknown, used."""
    states = {(draw.generator, draw.before) for draw in other_draws if draw.generator and draw.kind != "noise"}
    shared = (draw for draw in draws if draw.kind != "noise" and (draw.generator, draw.before) in states)
    return next((line for draw in shared if (line := draw.seeded_at or draw.location) is not None), None)


def judge_rows(loader: Loader) -> list[Finding]:
    """DDP505: samples with equal contents on ranks that have separate datasets or streams."""
    first = loader.first
    if loader.has_comparable_rows and all(list(p.rows) == list(first[0].rows) for p in first):
        return finding_on_loader(
            "DDP505",
            first[0],
            "Every rank takes the same samples in the same order from the loader, so together they do the work of one.",
            evidence=[f"{plural(len(first[0].rows), 'sample')} of the first epoch are equal, by their contents"],
            fix=SPLIT_STREAM if first[0].size < 0 else "",
        )
    if first[0].size >= 0 or not loader.num_shared_rows:
        return []
    message = f"The ranks share {loader.num_shared_rows} of the {min(len(p.rows) for p in first)} samples that each "
    message += "takes from the loader in an epoch, by their contents."
    return finding_on_loader("DDP505", first[0], message, severity=Severity.WARNING, fix=SPLIT_STREAM)


def judge_workers(loader: Loader) -> list[Finding]:
    """DDP505: loader workers that each iterate over the whole stream."""
    if not all(map(is_repeated_by_workers, loader.first)):
        return []
    p = loader.first[0]
    by_all = len(loader.first) > 1 and all(peer.rows == p.rows for peer in loader.first)
    return finding_on_loader(
        "DDP505",
        p,
        f"Each of the {p.workers} workers of the loader iterates over the whole stream, so every sample is taken "
        f"{p.workers} times{', and by every rank' if by_all else ''}.",
        severity=Severity.ERROR if by_all else Severity.WARNING,
        evidence=[f"of the {len(p.rows)} samples of the first pass, {len(set(p.rows))} differ by their contents"],
        fix=SPLIT_STREAM,
    )


def judge_equal_gradients(steps: Sequence[Steps], line: Location | None = None) -> list[Finding]:
    """Detect gradients that are equal on all ranks before the script averages them (DDP505)."""
    known = [step for step in steps if all(entry.allreduce_inputs for entry in step)]
    inputs = [{entry.allreduce_inputs for entry in step} for step in known]
    if len(known) < MIN_TAKEN_STEPS or max(map(len, inputs)) > 1 or len(set.union(*inputs)) < 2 or len(known[0]) < 2:
        return []
    return new_finding(
        "DDP505",
        ("gradients",),
        "Every rank has the same gradients even before they are averaged: the ranks use the same samples and the same "
        "random numbers, so together they do the work of one.",
        location=line or known[0][0].location,
        evidence=[f"their bits are equal on all ranks in all {len(known)} steps that were compared"],
    )


def judge_repeated_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """DDP505: samples that several ranks train on, if gradients are wrong or all equal."""
    step, rows = local[0].evidence.step, [item.sample_fingerprints for item in local]
    batch = Counter(local[0].global_sample_fingerprints)
    repeated = {sample for sample, count in Counter(itertools.chain(*rows)).items() if 0 < batch[sample] < count}
    gradients_alike = len({item.norm for item in local}) == 1 and local[0].norm > 0
    if not repeated or not (gradients_differ or gradients_alike):
        return []
    shared = []
    for index, item in enumerate(local):
        for peer in local[:index]:
            if common := len(repeated & set(rows[index]) & set(peer.sample_fingerprints)):
                is_are = "is" if common == 1 else "are"
                rank, other_rank = item.evidence.rank, peer.evidence.rank
                shared.append(f"{plural(common, 'sample')} on rank {rank} {is_are} on rank {other_rank} too")
    return new_finding(
        "DDP505",
        ("shard",),
        f"{len(repeated)} of the {batch.total()} samples of step {step} are on more than one rank, and count more "
        "than once in the average."
        if len(repeated) < len(set(rows[0]))
        else f"The ranks train on the same samples in step {step}, so together they do the work of fewer.",
        evidence=[*shared[:3], describe_unused_samples(local)],
    )
