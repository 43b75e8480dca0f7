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
    found = script_rows.judge_resumed(passes) or script_rows.judge_restarted(passes) if len(passes) > 1 else []
    lone = all(len({one.loader for one in of_rank if one.trains}) == 1 for of_rank in passes)
    by_place = [_trained_on(of_rank, by_line=not lone) for of_rank in passes]
    for place in by_place[0] if by_place else ():
        everyone = [of_rank[place] for of_rank in by_place if place in of_rank]
        if len(everyone) == len(passes):
            same = _are_of_same_data([of_rank[0] for of_rank in everyone])
            of_samples = judge_split(everyone) or judge_overlap(everyone, ranks) or judge_later_overlap(everyone)
            of_samples = of_samples or judge_left_out(everyone) or script_rows.judge_other_values(everyone)
            of_samples = of_samples or script_rows.judge_sharded_twice(everyone)
            of_samples = of_samples or script_rows.judge_rows(everyone, same_data=same)
            found += of_samples or script_rows.judge_workers(everyone) or script_rows.judge_labels(everyone)
            found += judge_epoch_order(everyone) or script_rows.judge_stale_workers(everyone)
            found += judge_shared_draws(everyone, same_data=same)
    return found


def _trained_on(
    passes: Sequence[LoaderPass], *, by_line: bool
) -> dict[tuple[Location | None, str, int], list[LoaderPass]]:
    """Group the training passes by loop line, dataset and number of occurrence.

    Loader numbers do not match between ranks if only one rank validates; lines do not if only one rank shows progress.
    """
    by_loader = wording.group_by((one for one in passes if one.trains), lambda one: one.loader)
    places: Counter[tuple[Location | None, str]] = Counter()
    found = {}
    for theirs in by_loader.values():
        place = theirs[0].location if by_line else None, theirs[0].dataset
        found[*place, places[place]] = theirs
        places[place] += 1
    return found


def judge_split(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: a random split drawn separately on each rank, with partly overlapping parts."""
    subsets = [set(of_rank[0].subset) for of_rank in passes]
    sizes = {len(of_rank[0].subset) for of_rank in passes}
    if not all(subsets) or len(sizes) > 1 or not _are_of_same_data([of_rank[0] for of_rank in passes]):
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
            f"rank {rank} begins with samples {_first(of_rank[0].subset)}" for rank, of_rank in enumerate(passes)
        ],
        fix="Draw the split from a generator with the same seed on every rank: "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)).",
    )


def judge_overlap(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Finding]:
    """DDP505: samples that several ranks train on in the same step or epoch."""
    first = [of_rank[0] for of_rank in passes]
    if len(first) < 2 or not all(one.indices for one in first) or not _are_of_same_data(first):
        return []
    size = min(len(one.indices) for one in first)
    lists = [tuple(one.indices[:size]) for one in first]
    numbers = ranks or range(len(lists))
    by_list = wording.group_by(range(len(lists)), lambda place: lists[place])
    groups = [[numbers[at] for at in places] for one, places in by_list.items() if len(places) > 1 < len(set(one))]
    groups.sort(key=len, reverse=True)
    if script_rows.deal_repeated(first):
        return []
    if groups:
        alike, *more = groups
        every = sum(map(len, groups)) == len(lists)
        return script_rows.finding_on_loader(
            "DDP505",
            first[0],
            f"{wording.format_ranks(alike).capitalize()} take the same samples in the same order from the loader, so "
            "together they do the work of one.",
            ranks=() if every else sorted(itertools.chain.from_iterable(groups)),
            evidence=[
                f"the first samples on each of them: {_first(lists[list(numbers).index(alike[0])])}",
                *_likewise(more),
                _taken(first[0]),
            ],
        )
    whole = all(map(_is_whole, first))
    if not whole:  # e.g. an endless sampler: parts are disjoint until all samples are taken
        size = min(size, first[0].size // len(first))
        lists = [indices[:size] for indices in lists]
    again = max(len(indices) - len(set(indices)) for indices in lists)  # duplicates that fill up a batch
    shared = script_rows.shared_by_ranks(first, lists, size)
    if any(one.replaces for one in first) or shared <= _AS_OFTEN * again:
        return []  # independent draws share about twice as many samples as they repeat
    if _come_several_times(lists):
        return []
    by_epoch = len({one.epoch for one in first}) > 1 and min(one.epoch for one in first) >= 0
    parts = "it shuffles all of the data, and each rank takes a part."
    in_others = ", and their samplers are in other epochs" if by_epoch else ""
    return script_rows.finding_on_loader(
        "DDP505",
        first[0],
        f"The ranks share {shared} of the {'' if whole else 'first '}{size} samples that each takes from the loader"
        f"{' in an epoch' * whole}, each in a different order{in_others}.",
        line=next((one.told for one in first if one.told), None) if by_epoch else None,
        severity=Severity.WARNING,
        evidence=[
            f"the epoch of the sampler: {'; '.join(wording.group_by_value([one.epoch for one in first]))}" * by_epoch,
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
    times = [len(list(same)) for _, same in itertools.groupby(itertools.chain(*zip(*lists, strict=True)))]
    return len(set(times[1:-1])) == 1 and times[1] > 1


def judge_later_overlap(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP505: samples disjoint between ranks in the first epoch and shared in later epochs."""
    epochs = list(zip(*passes, strict=False))
    first = passes[0][0]
    if len(passes) < 2 or len(epochs) < 2 or not _are_of_same_data(epochs[0]) or not all(map(_has_parts, epochs)):
        return []
    if any(one.size != first.size or one.epoch != of_ranks[0].epoch for of_ranks in epochs for one in of_ranks):
        return []
    size, union = len(first.indices), {index for one in epochs[0] for index in one.indices}
    shared = [script_rows.shared_by_ranks(of_ranks, [one.indices for one in of_ranks], size) for of_ranks in epochs[1:]]
    if len(union) <= (size - 1) * len(passes) or not all(shared):
        return []
    second = {index for one in epochs[1] for index in one.indices}
    return script_rows.finding_on_loader(
        "DDP505",
        first,
        f"In the first epoch the ranks take disjoint parts of the dataset; in the next one they share {shared[0]} of "
        f"the {size} samples that each takes, and {first.size - len(second)} of {first.size} are on no rank: the order "
        "is not drawn from the same random numbers on every rank.",
        severity=Severity.WARNING,
        evidence=[
            *(f"rank {rank} begins it with samples {_first(one.indices)}" for rank, one in enumerate(epochs[1][:3])),
            _taken(first),
        ],
        fix="Gather or reduce over all ranks the values by which the sampler orders or weights samples (such as "
        "losses), or broadcast its order, before each rank takes its part.",
    )


def _has_parts(of_ranks: Sequence[LoaderPass]) -> bool:
    """Return True if each rank exhausted its share of the dataset without duplicates."""
    whole = all(one.indices and _is_whole(one) and not one.replaces for one in of_ranks)
    once = all(len(set(one.indices)) == len(one.indices) == len(of_ranks[0].indices) for one in of_ranks)
    return whole and once and (len(of_ranks[0].indices) - 1) * len(of_ranks) < of_ranks[0].size


def judge_left_out(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP519: samples that no rank takes in any epoch."""
    epochs = [of_ranks for of_ranks in zip(*passes, strict=False) if all(one.indices for one in of_ranks)]
    first = [of_rank[0] for of_rank in passes]
    size = first[0].size
    twice = all(_takes_a_part(one) for of_ranks in epochs for one in of_ranks)
    if len(epochs) < 2 or size < 1 or not (twice or _are_of_same_data(first)):
        return []
    if any(one.subset or one.chooses or one.size != size for one in first):  # the other samples are a held-out set
        return []
    if any(not _is_whole(one) or one.replaces for of_ranks in epochs for one in of_ranks):
        return []
    seen = {frozenset(index for one in of_ranks for index in one.indices) for of_ranks in epochs}
    missing = size - max(map(len, seen))
    least = max(_LEFT_OUT * size, max(one.batch_size for one in first) * len(first))
    if missing <= least or (len(seen) > 1 and not twice):
        return []
    one = first[0]
    return script_rows.finding_on_loader(
        "DDP519",
        one,
        f"{missing} of the {size} samples of the dataset are on no rank in {'each' if twice else 'any'} of "
        f"{len(epochs)} epochs.",
        evidence=[
            f"{one.sampler} gives each rank {one.part} samples, and the rank takes only {len(one.indices)} of them: "
            "they are split a second time"
            if twice
            else f"each rank takes {len(one.indices)} samples, by {one.sampler}"
        ],
        fix="Give the sampler the world size and the rank of the process group, and split the data once only.",
    )


def _takes_a_part(one: LoaderPass) -> bool:
    """Check if a pass has at most half of its distributed sampler's samples."""
    return one.replicas > 1 and 2 * max(len(one.indices), one.batches * one.batch_size) <= one.part + one.batch_size


def judge_epoch_order(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: a shuffling sampler with the same order in every epoch."""
    first = passes[0][0]  # another model or dataset has its own epochs
    passes = [[o for o in of_rank if (o.wrappers, o.data) == (first.wrappers, first.data)] for of_rank in passes]
    for of_rank in passes:
        if not of_rank:
            return []
        orders = [one.order for one in of_rank if one.exhausted]
        if len({one.epoch for one in of_rank if one.exhausted}) > 1:
            return []  # set_epoch was called; the sampler has few orders
        indices = list(of_rank[0].indices)
        if not any(one.shuffles for one in of_rank) or indices == sorted(indices):
            return []
        if len(orders) < 2 or not orders[0] or len(set(orders)) > 1:
            return []
    one = passes[0][0]
    epochs = min(sum(each.exhausted for each in of_rank) for of_rank in passes)
    return script_rows.finding_on_loader(
        "DDP506",
        one,
        f"{one.sampler} shuffles, and all {epochs} epochs have the same order.",
        line=one.told or (one.epochs_at if one.has_epoch or one.epoch >= 0 else None),
        evidence=[f"every epoch begins with samples {_first(one.indices)} on rank 0"],
        fix=""
        if one.has_epoch
        else "Do not seed the generator of the loader again before each epoch."
        if one.epoch < 0
        else "Set the epoch of the sampler before each pass: its order is drawn from that.",
    )


def judge_inputs(
    inputs: Mapping[int, Sequence[Inputs]], draws: Mapping[int, Sequence[StepDraw]] = MappingProxyType({})
) -> list[Finding]:
    """DDP505: forward inputs that are equal on several ranks and change between steps.

    In all steps, in the first steps, or from a step on, as after a checkpoint with one rank's generator; all by rank.
    """
    steps = [of_ranks for of_ranks in zip(*inputs.values(), strict=False) if len({one.step for one in of_ranks}) == 1]
    given = {rank: [tuple(sorted(of_ranks[place].samples)) for of_ranks in steps] for place, rank in enumerate(inputs)}
    groups = _given_alike(given, len(steps))
    later = not groups
    if later:
        groups = _given_alike({rank: of_rank[::-1] for rank, of_rank in given.items()}, len(steps))
    if not groups:
        return []
    (same, held), *more = groups
    others = steps[::-1][held:] if later else steps[held:]
    line, forward = line_of_selection([draws.get(rank, ()) for rank in same]), steps[0][0].location
    every, all_of_them = len(same) == len(inputs), sorted(rank for ranks, _ in groups for rank in ranks)
    who = "Every rank's forward pass is" if every else f"The forward passes of {wording.format_ranks(same)} are"
    part = "all" if not others else "the last" if later else "the first"
    when = f"{part} {held} steps that were compared"
    differ = [
        f"{'until' if later else 'from'} step {one[0].step}{'' if later else ' on'} they differ" for one in others
    ]
    return wording.one_finding(
        "DDP505",
        ("forward",),
        f"{who} given the same samples, in {when}; so together {'the' if every else 'these'} ranks do the work of one.",
        ranks=() if len(all_of_them) == len(inputs) else all_of_them,
        location=line or forward,
        severity=Severity.WARNING if others else None,  # may be a warm-up
        evidence=[
            f"their bits are equal on {'all' if every else 'these'} ranks, and change from step to step",
            *differ[:1],
            *_likewise([ranks for ranks, _ in more]),
        ],
        related={"forward called": forward},
        fix="Seed with seed + rank, and restore the state of the generator from a checkpoint of each rank." * later,
    )


def _given_alike(given: Mapping[int, Sequence[tuple[int, ...]]], count: int) -> list[tuple[list[int], int]]:
    """Group ranks with equal samples at first, with the number of equal steps."""
    found = []
    for same in wording.group_by(given, lambda rank: tuple(given[rank][:FEWEST_INPUTS])).values():
        of_same = [{given[rank][place] for rank in same} for place in range(count)]
        held = next((place for place, samples in enumerate(of_same) if len(samples) > 1), count)
        if len(same) > 1 and held >= FEWEST_INPUTS and len(set.union(*of_same[:held])) > 1:
            found.append((same, held))
    return found


def _are_of_same_data(passes: Sequence[LoaderPass]) -> bool:
    """Return True if the same index is the same sample on every rank."""
    one, *others = passes
    return all(_is_of_same_data(one, other) or _hold_the_same(one, other) for other in others)


def _is_of_same_data(one: LoaderPass, other: LoaderPass) -> bool:
    if one.samples and one.samples.keys() == other.samples.keys():
        if all({*one.samples[name]}.isdisjoint(other.samples[name]) for name in one.samples):
            return False  # equal contents below may be labels in the same order
    alike = []  # for each varying part of a sample; augmentation changes inputs, not labels
    for place, rows in one.contents.items():
        common = rows.keys() & other.contents.get(place, {}).keys()
        if len({rows[index] for index in common}) > 1:
            alike.append(all(rows[index] == other.contents[place][index] for index in common))
    return any(alike) if alike else bool(one.digest) and one.digest == other.digest


def _hold_the_same(one: LoaderPass, other: LoaderPass) -> bool:
    """Check if datasets hold equal samples at the indices that both ranks took.

    If samples are drawn at random, rows of different ranks need not match.
    """
    if one.holds_samples and one.draws and other.draws and one.samples == other.samples:
        return True
    common = len({*one.indices} & {*other.indices})
    shared = len({*one.rows} & {*other.rows})
    return bool(one.samples) and one.samples == other.samples and 2 * shared >= common >= script_rows.FEWEST_ROWS


def _is_whole(one: LoaderPass) -> bool:
    """Return True if all batches were taken (loop exhausted or `expected` reached)."""
    return one.exhausted or one.batches == one.expected > 0


def _taken(one: LoaderPass) -> str:
    return f"each rank takes {len(one.indices)} of {wording.counted(one.size, 'sample')} ({one.sampler})"


def _first(indices: Sequence[int]) -> str:
    return f"{', '.join(map(str, indices[:6]))}{' ...' if len(indices) > 6 else ''}"
