"""DDP505, 506, 516 and 519: samples of data loaders, compared by contents instead of indices.

All functions take the passes of a data loader by rank; each rank's first passes have row fingerprints.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, join_names, one_finding

_SHARED = 0.2  # smaller shared fractions of a rank's samples are chance
_OF_CHANCE = 0.6  # fraction of the overlap that random parts would have (size / ranks)
_CHANCE = 1e-6  # largest probability of a match by chance
OTHER_VALUES = "values by rank"  # tag of findings that a differing derived table may explain
FEWEST_ROWS = 8  # rows needed to tell samples apart


_SPLIT_STREAM = (
    "Split the stream in the dataset's __iter__ by rank and world size, and by get_worker_info() if the loader has "
    "workers; if it shuffles before the split, use the same seed on every rank."
)


def judge_rows(passes: Sequence[Sequence[LoaderPass]], *, same_data: bool) -> list[Finding]:
    """DDP505 and 516: samples shared between ranks, each with its own data or stream."""
    first = [of_rank[0] for of_rank in passes]
    by_index = same_data and all(one.indices for one in first)  # indices are stronger evidence
    if by_index or len(first) < 2 or not all(_tell_apart(one) for one in first) or any(one.replaces for one in first):
        return []
    rows = [list(one.rows) for one in first]
    if all(of_rank == rows[0] for of_rank in rows):
        return finding_on_loader(
            "DDP505",
            first[0],
            "Every rank takes the same samples in the same order from the loader, so together they do the work of one.",
            evidence=[f"{counted(len(rows[0]), 'sample')} of the first epoch are equal, by their contents"],
            fix=_SPLIT_STREAM if first[0].size < 0 else "",
        )
    if not all(one.exhausted for one in first):
        return []
    size = min(map(len, rows))
    shared = shared_by_ranks(first, rows, size)
    if not shared or (first[0].size > 0 and shared < _OF_CHANCE * size / len(first)):
        return []  # e.g. duplicates in the data; parts of different orders share more
    others = any((one.samples, one.digest) != (first[0].samples, first[0].digest) for one in first)
    message = f"The ranks share {shared} of the {size} samples that each takes from the loader in an epoch"
    if first[0].size < 0:
        return finding_on_loader(
            "DDP505", first[0], f"{message}, by their contents.", severity=Severity.WARNING, fix=_SPLIT_STREAM
        )
    return finding_on_loader(
        "DDP516",
        first[0],
        f"{message}: each rank has built its part from a different order or split of the data.",
        line=first[0].split,
        severity=Severity.WARNING,
        evidence=["the datasets of the ranks have different samples, or a different order"] * others,
        fix="Sort the listed items, and shuffle or split with the same seed on every rank, before each rank takes its "
        "part.",
    )


def judge_workers(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP505: loader workers that each iterate over the whole stream."""
    first = [of_rank[0] for of_rank in passes]
    if not all(_is_taken_by_each_worker(one) for one in first):
        return []
    one = first[0]
    by_all = len(first) > 1 and all(other.rows == one.rows for other in first)
    return finding_on_loader(
        "DDP505",
        one,
        f"Each of the {one.workers} workers of the loader iterates over the whole stream, so every sample is taken "
        f"{one.workers} times{', and by every rank' if by_all else ''}.",
        severity=Severity.ERROR if by_all else Severity.WARNING,
        evidence=[f"of the {len(one.rows)} samples of the first pass, {len(set(one.rows))} differ by their contents"],
        fix=_SPLIT_STREAM,
    )


def _is_taken_by_each_worker(one: LoaderPass) -> bool:
    """Return True if each worker gave all samples of the stream.

    False if workers repeat their own parts or take turns. In an unfinished pass, compare the samples in order.
    """
    times = Counter(one.rows)
    if one.workers < 2 or one.size >= 0:
        return False
    if not one.exhausted:
        size = one.batch_size * one.workers
        turns = [one.rows[begun : begun + size] for begun in range(0, len(one.rows) - size + 1, size)]
        alike = all(turn == turn[: one.batch_size] * one.workers for turn in turns)
        return alike and len(set(turns)) > 1 and len(times) >= FEWEST_ROWS
    if len(times) < FEWEST_ROWS or set(times.values()) != {one.workers}:
        return False
    if len(set(one.rows[: len(times)])) == len(times):
        return False  # several passes over the stream, one after another
    rows = iter(one.rows)  # batches of the workers in turn; the last batches may be smaller
    given: list[set[int]] = [set() for _ in range(one.workers)]
    for begun in range(0, len(times), one.batch_size):
        for of_worker in given:
            of_worker |= set(itertools.islice(rows, min(one.batch_size, len(times) - begun)))
    return all(2 * len(of_worker) > len(times) for of_worker in given)


def judge_sharded_twice(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP519: a distributed sampler over datasets that are already split by rank."""
    first = [of_rank[0] for of_rank in passes]
    if len(first) < 2 or any(one.replaces or one.chooses or not one.indices for one in first):
        return []
    if not _share_places(first) or not _are_own_parts(passes):
        return []
    size = len(first[0].subset) or first[0].size
    return finding_on_loader(
        "DDP519",
        first[0],
        f"The data are split twice: each rank's dataset already is a separate part, and the sampler takes "
        f"{-(-size // len(first))} of its {size} samples in an epoch. The remaining samples are on no rank.",
        evidence=[f"{first[0].sampler} splits the indices of the dataset between {len(first)} ranks"],
        fix="Split once: leave out the split by rank, or keep the parts, and shuffle each with a RandomSampler.",
    )


def judge_stale_workers(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: persistent workers that repeat the first epoch's samples after the dataset changed."""
    changed: set[str] = set()
    for of_rank in passes:
        whole = [one for one in of_rank if (one.exhausted or one.indices) and one.rows]
        first, *later = [dict(zip(one.indices or itertools.count(), one.rows, strict=False)) for one in whole] or [{}]
        again = [{key: row for key, row in rows.items() if key in first} for rows in later]
        if not later or any(len(rows) < FEWEST_ROWS or not rows.items() <= first.items() for rows in again):
            return []
        if len(set(first.values())) < FEWEST_ROWS or not any(one.outdated or one.size < 0 for one in whole):
            return []
        names = {name for one in whole[1:] for name in one.state if one.state[name] != whole[0].state.get(name)}
        if not names or not whole[0].persistent:
            return []
        changed |= names
    one = passes[0][0]
    return finding_on_loader(
        "DDP506",
        one,
        f"The program changes {join_names(sorted(changed))} of the dataset from epoch to epoch, but the persistent "
        "workers of the loader keep their first copy: every epoch has the samples of the first.",
        line=one.stay_at,
        evidence=["persistent_workers=True: workers are started once, and the dataset is copied to them then"],
        fix="Set persistent_workers=False, or keep the epoch in shared memory: a tensor after share_memory_().",
    )


def judge_resumed(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: a resumed epoch, without its first batches, in a different order."""
    resumed = [_resumed(of_rank) for of_rank in passes]
    found = [one for one in resumed if one is not None]
    if len(found) < len(passes) or len({one.skipped for one, _ in found}) != 1:
        return []
    one, left = found[0]
    return finding_on_loader(
        "DDP506",
        one,
        f"An epoch is resumed in a different order: of the samples of the first {counted(one.skipped, 'batch')}, which "
        f"the loop skips, {left} had not been trained on. Others are trained on again.",
        line=one.told or one.epochs_at,
        evidence=["the previous pass began with samples that differ from the skipped ones"],
        fix="Before the loop that resumes, call set_epoch of the sampler with the epoch that is resumed; or restore "
        "the state of the generator from which the loader shuffles.",
    )


def _resumed(of_rank: Sequence[LoaderPass]) -> tuple[LoaderPass, int] | None:
    """Return the pass that resumes an epoch, and its number of untrained skipped samples."""
    trained = [one for one in of_rank if one.trains and not one.replaces]
    for kind in dict.fromkeys((one.dataset, one.size) for one in trained):
        alike = [one for one in trained if (one.dataset, one.size) == kind]
        for place, one in enumerate(alike):
            if (left := _left_by_resuming(alike[:place], one, alike[place + 1 : place + 2])) > 0:
                return one, left
    return None


def _left_by_resuming(earlier: Sequence[LoaderPass], one: LoaderPass, after: Sequence[LoaderPass]) -> int:
    """Count skipped samples that did not begin the previous pass; 0 if consistent."""
    count = one.skipped * one.batch_size
    passed = set(one.indices[:count])
    # one more batch is no evidence: a prefetching loader takes the next batch early
    if not earlier or not earlier[-1].skipped + 1 < one.skipped <= earlier[-1].batches or len(passed) < count:
        return 0
    if not all(o.indices for o in (*earlier, *after)):
        return 0
    begun = [place for place, o in enumerate(earlier) if set(o.indices[:count]) <= passed]
    if begun:  # the previous or an earlier pass matches; after an earlier pass, the next passes must match, too
        next_of_it = earlier[begun[-1] + 1 : begun[-1] + 2]
        if not next_of_it or not after or _begin_alike(next_of_it[0], after[0]):
            return 0
    return len(passed - set(earlier[-1].indices[:count]))


def _begin_alike(one: LoaderPass, other: LoaderPass) -> bool:
    size = min(len(one.indices), len(other.indices))
    return set(one.indices[:size]) == set(other.indices[:size])


def judge_restarted(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: training continued after some epochs with the sampler at epoch 0."""
    first = [next((one for one in of_rank if one.trains and one.restored), None) for of_rank in passes]
    found = [one for one in first if one is not None and _gives_order(one) and one.has_epoch and one.epoch == 0]
    done = [one for one in found if _goes_on_after_epochs(one)]
    if len(found) < len(passes) or not done or (restored := done[0].restored) is None:
        return []
    one = done[0]
    far = counted(restored.steps, "optimizer step") if restored.steps else counted(restored.epochs, "epoch")
    return finding_on_loader(
        "DDP506",
        one,
        f"Training continues after {far}, and {one.sampler} is at epoch 0 again: the epochs repeat the orders of the "
        "first ones.",
        line=one.told or one.epochs_at,
        evidence=[f"an optimizer was restored at {restored.location}"],
        fix="Continue to count epochs from that of the checkpoint, and call set_epoch with the number before each.",
    )


def _gives_order(one: LoaderPass) -> bool:
    """Return True if the sampler shuffles, by flag or by indices."""
    return one.shuffles or (not one.replaces and list(one.indices) != sorted(one.indices))


def _goes_on_after_epochs(one: LoaderPass) -> bool:
    """Return True if the restored training had covered the data at least once."""
    if one.restored is None or not one.restored.steps:
        return one.restored is not None and one.restored.epochs > 0 and not one.skipped
    batches = one.size // one.replicas // one.batch_size if one.replicas else one.expected
    worked = max(1, one.batches - one.skipped)
    return one.restored.steps * worked >= (batches + (2 if one.skipped else 0)) * one.steps > 0


def judge_labels(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: the same samples with different labels on different ranks."""
    labels = [_labels(of_rank) for of_rank in passes]
    if len(labels) < 2 or not all(labels):
        return []
    common = sorted(set.intersection(*map(set, labels)))
    apart = [row for row in common if len({of_rank[row] for of_rank in labels}) > 1]
    maps = [{of_rank[row] for row in common} for of_rank in labels]
    if len(common) < FEWEST_ROWS or 2 * len(apart) < len(common) or min(map(len, maps)) < 2:
        return []
    for of_rank in labels[1:]:  # labels of two ranks must correspond one to one
        pairs = {(labels[0][row], of_rank[row]) for row in common}
        if len(pairs) != len({a for a, _ in pairs}) or len(pairs) != len({b for _, b in pairs}):
            return []
    one = passes[0][0]
    return finding_on_loader(
        "DDP516",
        one,
        f"The same samples have different labels on different ranks: {len(apart)} of {len(common)} that were compared.",
        line=one.split,
        evidence=["each label of one rank corresponds to one different label of the other"],
    )


def judge_other_values(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: the same samples with values that differ between ranks, but not between epochs."""
    first = [of_rank[0] for of_rank in passes]
    rows = [_by_place(of_rank, labels=False) for of_rank in passes]
    if len(first) < 2 or not all(rows) or any(one.draws for of_rank in passes for one in of_rank):
        return []
    held = first[0].samples, first[0].state
    hold_same = bool(first[0].samples) and all((one.samples, one.state) == held for one in first)
    if not hold_same and hold_own_parts(first):
        return []  # e.g. one label per rank
    for number, mine in enumerate(rows):
        for other, theirs in enumerate(rows[:number]):
            common = sorted(mine.keys() & theirs.keys())
            apart = [place for place in common if mine[place] != theirs[place]]
            if len(common) < FEWEST_ROWS or 2 * len(apart) < len(common):
                continue
            if not hold_same and not _are_named_alike(passes[number], passes[other], common):
                continue
            same = "the datasets hold the same samples" if hold_same else "these samples have the same labels"
            return finding_on_loader(
                "DDP516",
                first[0],
                "The same samples have different values on different ranks, the same ones in every epoch: "
                f"{len(apart)} of {len(common)} that ranks {other} and {number} have both taken.",
                severity=Severity.WARNING,
                evidence=[f"on all ranks {same}", "no random numbers are drawn for them"],
                tags=(OTHER_VALUES,),
                fix="Make each sample in the same way on every rank: hash() of a text differs between processes unless "
                "PYTHONHASHSEED is set (zlib.crc32 does not), and so does the order of a set; take statistics of all "
                "of the data, or all_reduce their sums.",
            )
    return []


def _are_named_alike(mine: Sequence[LoaderPass], theirs: Sequence[LoaderPass], places: Sequence[int]) -> bool:
    """Return True if labels show that equal positions are the same samples."""
    labels = _by_place(mine, labels=True), _by_place(theirs, labels=True)
    pairs = [(labels[0][place], labels[1].get(place)) for place in places if place in labels[0]]
    times = Counter(label for label, _ in pairs)
    chance = sum((count / len(pairs)) ** 2 for count in times.values())  # probability that one label matches at random
    in_order = sum(a != b for a, b in itertools.pairwise(label for label, _ in pairs)) < 2 * len(times)
    return all(a == b for a, b in pairs) and bool(pairs) and not in_order and chance ** len(pairs) < _CHANCE


def have_same_labels(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if samples common to all ranks have the same labels."""
    labels = [_labels(of_rank) for of_rank in passes]
    common = set.intersection(*map(set, labels)) if labels else set()
    alike = all(of_rank[row] == labels[0][row] for of_rank in labels for row in common)
    return alike and len(common) >= FEWEST_ROWS and len({labels[0][row] for row in common}) > 1


def _labels(of_rank: Sequence[LoaderPass]) -> dict[int, int]:
    """Map rows to labels; empty if a row has several labels."""
    found: dict[int, int] = {}
    for one in of_rank:
        if len(one.labels) == len(one.rows):
            for row, label in zip(one.rows, one.labels, strict=True):
                if found.setdefault(row, label) != label:
                    return {}
    return found


def _tell_apart(one: LoaderPass) -> bool:
    """Return True if the rows are enough, and nearly all distinct."""
    return len(one.rows) >= FEWEST_ROWS and len(set(one.rows)) >= 0.9 * len(one.rows)


def _positions(one: LoaderPass) -> set[int]:
    """Return the dataset positions that the sampler took."""
    if not one.subset:
        return set(one.indices)
    place = {index: number for number, index in enumerate(one.subset)}
    return {place.get(index, -1) for index in one.indices}


def _share_places(first: Sequence[LoaderPass]) -> bool:
    """Return True if the samplers split the same positions between ranks."""
    if all(one.replicas == len(first) for one in first):
        return True
    taken = [_positions(one) for one in first]
    sizes = {len(one.subset) or one.size for one in first}
    if len(sizes) > 1 or not all(taken) or any(not one.exhausted for one in first):
        return False
    (size,) = sizes
    every = set.union(*taken)
    apart = sum(map(len, taken)) - len(every)
    most = -(-size // len(first))
    return max(map(len, taken)) <= most and apart <= len(first) and len(every) >= size - first[0].batch_size * 2


def _are_own_parts(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if the ranks' datasets are disjoint, not just drawn at random."""
    first = [of_rank[0] for of_rank in passes]
    if all(one.subset for one in first):
        return _disjoint([one.subset for one in first])
    if any(one.subset for one in first) or not all(_tell_apart(one) for one in first):
        return False
    names = set.intersection(*(set(one.samples) for one in first))
    apart = bool(names) and all(_disjoint([one.samples[name] for one in first]) for name in names)
    of_whole = all(one.whole and (one.whole < 0 or _is_share(one, len(first))) for one in first)
    drawn_alike = first[0].drawn and len({one.drawn for one in first}) == 1
    return bool(of_whole or drawn_alike) and _disjoint([one.rows for one in first]) and (apart or _give_others(passes))


def deal_repeated(first: Sequence[LoaderPass]) -> bool:
    """Check if samplers repeat each sample on several ranks, which augment it differently."""
    return all(one.size > len(first) and one.dealt + len(first) >= 2 * one.size for one in first)


def hold_own_parts(first: Sequence[LoaderPass]) -> bool:
    """Return True if the ranks' datasets are disjoint shares of one array."""
    parts = all(one.whole > 0 and _is_share(one, len(first)) and _tell_apart(one) for one in first)
    return len(first) > 1 and parts and _disjoint([one.rows for one in first])


def _is_share(one: LoaderPass, ranks: int) -> bool:
    return 0 <= one.whole - ranks * (one.size - 1) <= 2 * ranks


def _give_others(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if each position is a different sample on each rank."""
    rows = [_by_place(of_rank, labels=False) for of_rank in passes]
    labels = [_by_place(of_rank, labels=True) for of_rank in passes]
    for number, mine in enumerate(rows):
        for other, theirs in enumerate(rows[:number]):
            common = mine.keys() & theirs.keys()
            if len(common) < FEWEST_ROWS or any(mine[place] == theirs[place] for place in common):
                return False
            named = [(labels[number][place], labels[other].get(place)) for place in common & labels[number].keys()]
            if len(set(named)) > 1 and all(a == b for a, b in named):
                return False  # ranks transform the same samples differently
    return True


def _by_place(of_rank: Sequence[LoaderPass], *, labels: bool) -> dict[int, int]:
    """Map positions to rows or labels; empty if values change or rarely repeat."""
    found: dict[int, int] = {}
    again = 0
    for one in of_rank:
        given = one.labels if labels else one.rows
        for place, value in zip(one.indices, given, strict=True) if len(given) == len(one.indices) else ():
            again += place in found
            if found.setdefault(place, value) != value:
                return {}
    return found if again >= FEWEST_ROWS else {}


def _disjoint(parts: Sequence[Sequence[int]]) -> bool:
    return not any(set(a) & set(b) for number, a in enumerate(parts) for b in parts[:number])


def shared_by_ranks(first: Sequence[LoaderPass], taken: Sequence[Iterable[int]], size: int) -> int:
    """Return the largest overlap of two ranks; 0 if padding explains it."""
    sets = [set(of_rank) for of_rank in taken]
    shared = max(len(a & b) for number, a in enumerate(sets) for b in sets[:number])
    at_the_end = max(one.batch_size for one in first) * len(first)
    return shared if shared > at_the_end and shared >= _SHARED * size else 0


def finding_on_loader(
    code: str, one: LoaderPass, message: str, *, line: Location | None = None, **more: Any
) -> list[Finding]:
    """Report at `line`, else where the sampler or loader is made."""
    where = line or one.made or one.location
    related = {"loop over the loader": one.location, f"{one.sampler or 'loader'} made": one.made}
    return one_finding(code, (one.dataset,), message, location=where, related=related, **more)
