"""DDP505, 506, 510, 516 and 519: the data of a script, by its data loaders and forward inputs.

Passes over one data loader are lists by rank; a data loader missing on some rank is not judged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ddpcheck.findings import wording
from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.judge.data import script_rows
from ddpcheck.judge.data.script_draws import judge_shared_draws, line_of_selection

_LEFT_OUT = 0.05  # smaller fractions of unused samples may be rounding at the end
_AS_OFTEN = 4
FEWEST_INPUTS = 3  # steps with the same samples on several ranks


def judge_loaders(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Finding]:
    """Judge every data loader; `passes` by training rank, in order of start."""
    findings = script_rows.judge_resumed(passes) or script_rows.judge_restarted(passes) if len(passes) > 1 else []
    lone = all(len({loader.loader for loader in loaders if loader.trains}) == 1 for loaders in passes)
    by_key = [_trained_on(loaders, by_line=not lone) for loaders in passes]
    for key in by_key[0] if by_key else ():
        matched = [groups[key] for groups in by_key if key in groups]
        if len(matched) == len(passes):
            same_data = _are_of_same_data([loaders[0] for loaders in matched])
            of_samples = judge_split(matched) or judge_overlap(matched, ranks) or judge_later_overlap(matched)
            of_samples = of_samples or judge_left_out(matched) or script_rows.judge_other_values(matched)
            of_samples = of_samples or script_rows.judge_sharded_twice(matched)
            of_samples = of_samples or script_rows.judge_rows(matched, same_data=same_data)
            findings += of_samples or script_rows.judge_workers(matched) or script_rows.judge_labels(matched)
            findings += judge_epoch_order(matched) or script_rows.judge_stale_workers(matched)
            findings += judge_shared_draws(matched, same_data=same_data)
    return findings


def _trained_on(
    passes: Sequence[LoaderPass], *, by_line: bool
) -> dict[tuple[Location | None, str, int], list[LoaderPass]]:
    """Group the training passes by loop line, dataset and number of occurrence.

    Loader numbers do not match between ranks if only one rank validates; lines do not if only one rank shows progress.
    """
    by_loader = wording.group_by((loader for loader in passes if loader.trains), lambda loader: loader.loader)
    counts: Counter[tuple[Location | None, str]] = Counter()
    groups = {}
    for loaders in by_loader.values():
        key = loaders[0].location if by_line else None, loaders[0].dataset
        groups[*key, counts[key]] = loaders
        counts[key] += 1
    return groups


def judge_split(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: a random split drawn separately on each rank, with partly overlapping parts."""
    subsets = [set(loaders[0].subset) for loaders in passes]
    sizes = {len(loaders[0].subset) for loaders in passes}
    if not all(subsets) or len(sizes) > 1 or not _are_of_same_data([loaders[0] for loaders in passes]):
        return []
    common = set.intersection(*subsets)
    if all(subset == common for subset in subsets) or not any(a & b for a in subsets for b in subsets if a is not b):
        return []
    lone = len(subsets[0]) - len(common)
    return script_rows.finding_on_loader(
        "DDP516",
        passes[0][0],
        f"The ranks have split the dataset differently: {lone} of the {wording.counted(len(subsets[0]), 'sample')} of "
        "rank 0's part are not in the part of every other rank, so one rank trains on samples that another one holds "
        "out.",
        line=passes[0][0].split or passes[0][0].location,
        ranks=wording.minority_ranks([tuple(sorted(subset)) for subset in subsets]) if len(subsets) > 2 else (),
        evidence=[
            f"rank {rank} begins with samples {_first(loaders[0].subset)}" for rank, loaders in enumerate(passes)
        ],
        fix="Draw the split from a generator with the same seed on every rank: "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)).",
    )


def judge_overlap(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Finding]:
    """DDP505: samples that several ranks train on in the same step or epoch."""
    first = [loaders[0] for loaders in passes]
    if len(first) < 2 or not all(loader.indices for loader in first) or not _are_of_same_data(first):
        return []
    size = min(len(loader.indices) for loader in first)
    lists = [tuple(loader.indices[:size]) for loader in first]
    numbers = ranks or range(len(lists))
    by_list = wording.group_by(range(len(lists)), lambda i: lists[i])
    groups = [[numbers[i] for i in places] for order, places in by_list.items() if len(places) > 1 < len(set(order))]
    groups.sort(key=len, reverse=True)
    if script_rows.deal_repeated(first):
        return []
    if groups:
        largest, *more = groups
        are_all = sum(map(len, groups)) == len(lists)
        return script_rows.finding_on_loader(
            "DDP505",
            first[0],
            f"{wording.format_ranks(largest).capitalize()} take the same samples in the same order from the loader, so "
            "together they do the work of one.",
            ranks=() if are_all else sorted(itertools.chain.from_iterable(groups)),
            evidence=[
                f"the first samples on each of them: {_first(lists[list(numbers).index(largest[0])])}",
                *_likewise(more),
                _taken(first[0]),
            ],
        )
    whole = all(map(_is_whole, first))
    if not whole:  # e.g. an endless sampler: parts are disjoint until all samples are taken
        size = min(size, first[0].size // len(first))
        lists = [indices[:size] for indices in lists]
    repeats = max(len(indices) - len(set(indices)) for indices in lists)  # duplicates that fill up a batch
    shared = script_rows.shared_by_ranks(first, lists, size)
    if any(loader.replaces for loader in first) or shared <= _AS_OFTEN * repeats:
        return []  # independent draws share about twice as many samples as they repeat
    if _come_several_times(lists):
        return []
    by_epoch = len({loader.epoch for loader in first}) > 1 and min(loader.epoch for loader in first) >= 0
    parts = "it shuffles all of the data, and each rank takes a part."
    in_others = ", and their samplers are in other epochs" if by_epoch else ""
    return script_rows.finding_on_loader(
        "DDP505",
        first[0],
        f"The ranks share {shared} of the {'' if whole else 'first '}{size} samples that each takes from the loader"
        f"{' in an epoch' * whole}, each in a different order{in_others}.",
        line=next((loader.told for loader in first if loader.told), None) if by_epoch else None,
        severity=Severity.WARNING,
        evidence=[
            f"the epoch of the sampler: {'; '.join(wording.group_by_value([p.epoch for p in first]))}" * by_epoch,
            *(f"rank {rank} begins with samples {_first(indices)}" for rank, indices in enumerate(lists[:3])),
            _taken(first[0]),
        ],
        fix=f"Tell the sampler the same epoch on every rank: {parts}"
        if by_epoch
        else f"Give the sampler the same seed on every rank: {parts}"
        if size < first[0].size and first[0].has_epoch
        else "",
    )


def _likewise(groups: Sequence[Sequence[int]]) -> list[str]:
    """Mention further groups of ranks in the evidence."""
    return (
        [f"likewise {wording.join_names([*map(wording.format_ranks, groups)])}, with different samples"]
        if groups
        else []
    )


def _come_several_times(lists: Sequence[Sequence[int]]) -> bool:
    """Return True if each sample repeats equally often in a row (repeated augmentation)."""
    lengths = [len(list(group)) for _, group in itertools.groupby(itertools.chain(*zip(*lists, strict=True)))]
    return len(set(lengths[1:-1])) == 1 and lengths[1] > 1


def judge_later_overlap(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP505: samples disjoint between ranks in the first epoch and shared in later epochs."""
    epochs = list(zip(*passes, strict=False))
    first = passes[0][0]
    if len(passes) < 2 or len(epochs) < 2 or not _are_of_same_data(epochs[0]) or not all(map(_has_parts, epochs)):
        return []
    if any(loader.size != first.size or loader.epoch != epoch[0].epoch for epoch in epochs for loader in epoch):
        return []
    size, union = len(first.indices), {index for loader in epochs[0] for index in loader.indices}
    shared = [script_rows.shared_by_ranks(epoch, [loader.indices for loader in epoch], size) for epoch in epochs[1:]]
    if len(union) <= (size - 1) * len(passes) or not all(shared):
        return []
    second = {index for loader in epochs[1] for index in loader.indices}
    return script_rows.finding_on_loader(
        "DDP505",
        first,
        f"In the first epoch the ranks take disjoint parts of the dataset; in the next one they share {shared[0]} of "
        f"the {size} samples that each takes, and {first.size - len(second)} of {first.size} are on no rank: the order "
        "is not drawn from the same random numbers on every rank.",
        severity=Severity.WARNING,
        evidence=[
            *(f"rank {rank} begins it with samples {_first(p.indices)}" for rank, p in enumerate(epochs[1][:3])),
            _taken(first),
        ],
        fix="Gather or reduce over all ranks the values by which the sampler orders or weights samples (such as "
        "losses), or broadcast its order, before each rank takes its part.",
    )


def _has_parts(epoch: Sequence[LoaderPass]) -> bool:
    """Return True if each rank exhausted its share of the dataset without duplicates."""
    whole = all(loader.indices and _is_whole(loader) and not loader.replaces for loader in epoch)
    once = all(len(set(loader.indices)) == len(loader.indices) == len(epoch[0].indices) for loader in epoch)
    return whole and once and (len(epoch[0].indices) - 1) * len(epoch) < epoch[0].size


def judge_left_out(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP519: samples that no rank takes in any epoch."""
    epochs = [epoch for epoch in zip(*passes, strict=False) if all(loader.indices for loader in epoch)]
    first = [loaders[0] for loaders in passes]
    size = first[0].size
    twice = all(_takes_a_part(loader) for epoch in epochs for loader in epoch)
    if len(epochs) < 2 or size < 1 or not (twice or _are_of_same_data(first)):
        return []
    if any(p.subset or p.chooses or p.size != size for p in first):  # the other samples are a held-out set
        return []
    if any(not _is_whole(loader) or loader.replaces for epoch in epochs for loader in epoch):
        return []
    seen = {frozenset(index for loader in epoch for index in loader.indices) for epoch in epochs}
    missing = size - max(map(len, seen))
    least = max(_LEFT_OUT * size, max(loader.batch_size for loader in first) * len(first))
    if missing <= least or (len(seen) > 1 and not twice):
        return []
    loader = first[0]
    return script_rows.finding_on_loader(
        "DDP519",
        loader,
        f"{missing} of the {size} samples of the dataset are on no rank in {'each' if twice else 'any'} of "
        f"{len(epochs)} epochs.",
        evidence=[
            f"{loader.sampler} gives each rank {loader.part} samples, and the rank takes only {len(loader.indices)} of "
            "them: they are split a second time"
            if twice
            else f"each rank takes {len(loader.indices)} samples, by {loader.sampler}"
        ],
        fix="Give the sampler the world size and the rank of the process group, and split the data once only.",
    )


def _takes_a_part(p: LoaderPass) -> bool:
    """Check if a pass has at most half of its distributed sampler's samples."""
    return p.replicas > 1 and 2 * max(len(p.indices), p.batches * p.batch_size) <= p.part + p.batch_size


def judge_epoch_order(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: a shuffling sampler with the same order in every epoch."""
    first = passes[0][0]  # another model or dataset has its own epochs
    passes = [[o for o in loaders if (o.wrappers, o.data) == (first.wrappers, first.data)] for loaders in passes]
    for loaders in passes:
        if not loaders:
            return []
        orders = [loader.order for loader in loaders if loader.exhausted]
        if len({loader.epoch for loader in loaders if loader.exhausted}) > 1:
            return []  # set_epoch was called; the sampler has few orders
        indices = list(loaders[0].indices)
        if not any(loader.shuffles for loader in loaders) or indices == sorted(indices):
            return []
        if len(orders) < 2 or not orders[0] or len(set(orders)) > 1:
            return []
    loader = passes[0][0]
    epochs = min(sum(loader.exhausted for loader in loaders) for loaders in passes)
    return script_rows.finding_on_loader(
        "DDP506",
        loader,
        f"{loader.sampler} shuffles, and all {epochs} epochs have the same order.",
        line=loader.told or (loader.epochs_at if loader.has_epoch or loader.epoch >= 0 else None),
        evidence=[f"every epoch begins with samples {_first(loader.indices)} on rank 0"],
        fix=""
        if loader.has_epoch
        else "Do not seed the generator of the loader again before each epoch."
        if loader.epoch < 0
        else "Set the epoch of the sampler before each pass: its order is drawn from that.",
    )


def judge_inputs(
    inputs: Mapping[int, Sequence[Inputs]], draws: Mapping[int, Sequence[StepDraw]] = MappingProxyType({})
) -> list[Finding]:
    """DDP505: forward inputs that are equal on several ranks and change between steps.

    In all steps, in the first steps, or from a step on, as after a checkpoint with one rank's generator; all by rank.
    """
    steps = [step for step in zip(*inputs.values(), strict=False) if len({call.step for call in step}) == 1]
    samples = {rank: [tuple(sorted(step[index].samples)) for step in steps] for index, rank in enumerate(inputs)}
    groups = _given_alike(samples, len(steps))
    later = not groups
    if later:
        groups = _given_alike({rank: rank_samples[::-1] for rank, rank_samples in samples.items()}, len(steps))
    if not groups:
        return []
    (equal_ranks, count), *more = groups
    rest = steps[::-1][count:] if later else steps[count:]
    line, forward = line_of_selection([draws.get(rank, ()) for rank in equal_ranks]), steps[0][0].location
    whole, all_ranks = len(equal_ranks) == len(inputs), sorted(rank for ranks, _ in groups for rank in ranks)
    who = "Every rank's forward pass is" if whole else f"The forward passes of {wording.format_ranks(equal_ranks)} are"
    part = "all" if not rest else "the last" if later else "the first"
    when = f"{part} {count} steps that were compared"
    differ = [
        f"{'until' if later else 'from'} step {step[0].step}{'' if later else ' on'} they differ" for step in rest
    ]
    return wording.one_finding(
        "DDP505",
        ("forward",),
        f"{who} given the same samples, in {when}; so together {'the' if whole else 'these'} ranks do the work of one.",
        ranks=() if len(all_ranks) == len(inputs) else all_ranks,
        location=line or forward,
        severity=Severity.WARNING if rest else None,  # may be a warm-up
        evidence=[
            f"their bits are equal on {'all' if whole else 'these'} ranks, and change from step to step",
            *differ[:1],
            *_likewise([ranks for ranks, _ in more]),
        ],
        related={"forward called": forward},
        fix="Seed with seed + rank, and restore the state of the generator from a checkpoint of each rank." * later,
    )


def _given_alike(samples_by_rank: Mapping[int, Sequence[tuple[int, ...]]], count: int) -> list[tuple[list[int], int]]:
    """Group ranks with equal samples at first, with the number of equal steps."""
    groups = []
    for ranks in wording.group_by(samples_by_rank, lambda rank: tuple(samples_by_rank[rank][:FEWEST_INPUTS])).values():
        by_step = [{samples_by_rank[rank][index] for rank in ranks} for index in range(count)]
        equal_steps = next((index for index, samples in enumerate(by_step) if len(samples) > 1), count)
        if len(ranks) > 1 and equal_steps >= FEWEST_INPUTS and len(set.union(*by_step[:equal_steps])) > 1:
            groups.append((ranks, equal_steps))
    return groups


def _are_of_same_data(passes: Sequence[LoaderPass]) -> bool:
    """Return True if the same index is the same sample on every rank."""
    first, *rest = passes
    return all(_is_of_same_data(first, loader) or _hold_the_same(first, loader) for loader in rest)


def _is_of_same_data(first: LoaderPass, second: LoaderPass) -> bool:
    if first.samples and first.samples.keys() == second.samples.keys():
        if all({*first.samples[name]}.isdisjoint(second.samples[name]) for name in first.samples):
            return False  # equal contents below may be labels in the same order
    matches = []  # for each varying part of a sample; augmentation changes inputs, not labels
    for part, rows in first.contents.items():
        common = rows.keys() & second.contents.get(part, {}).keys()
        if len({rows[index] for index in common}) > 1:
            matches.append(all(rows[index] == second.contents[part][index] for index in common))
    return any(matches) if matches else bool(first.digest) and first.digest == second.digest


def _hold_the_same(first: LoaderPass, second: LoaderPass) -> bool:
    """Check if datasets hold equal samples at the indices that both ranks took.

    If samples are drawn at random, rows of different ranks need not match.
    """
    if first.holds_samples and first.draws and second.draws and first.samples == second.samples:
        return True
    common = len({*first.indices} & {*second.indices})
    shared = len({*first.rows} & {*second.rows})
    return bool(first.samples) and first.samples == second.samples and 2 * shared >= common >= script_rows.FEWEST_ROWS


def _is_whole(loader: LoaderPass) -> bool:
    """Return True if all batches were taken (loop exhausted or `expected` reached)."""
    return loader.exhausted or loader.batches == loader.expected > 0


def _taken(loader: LoaderPass) -> str:
    return f"each rank takes {len(loader.indices)} of {wording.counted(loader.size, 'sample')} ({loader.sampler})"


def _first(indices: Sequence[int]) -> str:
    return f"{', '.join(map(str, indices[:6]))}{' ...' if len(indices) > 6 else ''}"
