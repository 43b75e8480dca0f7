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
    first = [loaders[0] for loaders in passes]
    by_index = same_data and all(loader.indices for loader in first)  # indices are stronger evidence
    if by_index or len(first) < 2 or not all(_tell_apart(p) for p in first) or any(p.replaces for p in first):
        return []
    rows = [list(loader.rows) for loader in first]
    if all(rank_rows == rows[0] for rank_rows in rows):
        return finding_on_loader(
            "DDP505",
            first[0],
            "Every rank takes the same samples in the same order from the loader, so together they do the work of one.",
            evidence=[f"{counted(len(rows[0]), 'sample')} of the first epoch are equal, by their contents"],
            fix=_SPLIT_STREAM if first[0].size < 0 else "",
        )
    if not all(loader.exhausted for loader in first):
        return []
    size = min(map(len, rows))
    shared = shared_by_ranks(first, rows, size)
    if not shared or (first[0].size > 0 and shared < _OF_CHANCE * size / len(first)):
        return []  # e.g. duplicates in the data; parts of different orders share more
    differ = any((loader.samples, loader.digest) != (first[0].samples, first[0].digest) for loader in first)
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
        evidence=["the datasets of the ranks have different samples, or a different order"] * differ,
        fix="Sort the listed items, and shuffle or split with the same seed on every rank, before each rank takes its "
        "part.",
    )


def judge_workers(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP505: loader workers that each iterate over the whole stream."""
    first = [loaders[0] for loaders in passes]
    if not all(_is_taken_by_each_worker(p) for p in first):
        return []
    p = first[0]
    by_all = len(first) > 1 and all(peer.rows == p.rows for peer in first)
    return finding_on_loader(
        "DDP505",
        p,
        f"Each of the {p.workers} workers of the loader iterates over the whole stream, so every sample is taken "
        f"{p.workers} times{', and by every rank' if by_all else ''}.",
        severity=Severity.ERROR if by_all else Severity.WARNING,
        evidence=[f"of the {len(p.rows)} samples of the first pass, {len(set(p.rows))} differ by their contents"],
        fix=_SPLIT_STREAM,
    )


def _is_taken_by_each_worker(loader: LoaderPass) -> bool:
    """Return True if each worker gave all samples of the stream.

    False if workers repeat their own parts or take turns. In an unfinished pass, compare the samples in order.
    """
    counts = Counter(loader.rows)
    if loader.workers < 2 or loader.size >= 0:
        return False
    if not loader.exhausted:
        size = loader.batch_size * loader.workers
        turns = [loader.rows[begun : begun + size] for begun in range(0, len(loader.rows) - size + 1, size)]
        repeats = all(turn == turn[: loader.batch_size] * loader.workers for turn in turns)
        return repeats and len(set(turns)) > 1 and len(counts) >= FEWEST_ROWS
    if len(counts) < FEWEST_ROWS or set(counts.values()) != {loader.workers}:
        return False
    if len(set(loader.rows[: len(counts)])) == len(counts):
        return False  # several passes over the stream, one after another
    rows = iter(loader.rows)  # batches of the workers in turn; the last batches may be smaller
    by_worker: list[set[int]] = [set() for _ in range(loader.workers)]
    for begun in range(0, len(counts), loader.batch_size):
        for worker_rows in by_worker:
            worker_rows |= set(itertools.islice(rows, min(loader.batch_size, len(counts) - begun)))
    return all(2 * len(worker_rows) > len(counts) for worker_rows in by_worker)


def judge_sharded_twice(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP519: a distributed sampler over datasets that are already split by rank."""
    first = [loaders[0] for loaders in passes]
    if len(first) < 2 or any(loader.replaces or loader.chooses or not loader.indices for loader in first):
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
    for loaders in passes:
        whole = [loader for loader in loaders if (loader.exhausted or loader.indices) and loader.rows]
        first, *later = [dict(zip(p.indices or itertools.count(), p.rows, strict=False)) for p in whole] or [{}]
        repeats = [{key: row for key, row in rows.items() if key in first} for rows in later]
        if not later or any(len(rows) < FEWEST_ROWS or not rows.items() <= first.items() for rows in repeats):
            return []
        if len(set(first.values())) < FEWEST_ROWS or not any(loader.outdated or loader.size < 0 for loader in whole):
            return []
        names = {name for p in whole[1:] for name in p.state if p.state[name] != whole[0].state.get(name)}
        if not names or not whole[0].persistent:
            return []
        changed |= names
    loader = passes[0][0]
    return finding_on_loader(
        "DDP506",
        loader,
        f"The program changes {join_names(sorted(changed))} of the dataset from epoch to epoch, but the persistent "
        "workers of the loader keep their first copy: every epoch has the samples of the first.",
        line=loader.stay_at,
        evidence=["persistent_workers=True: workers are started once, and the dataset is copied to them then"],
        fix="Set persistent_workers=False, or keep the epoch in shared memory: a tensor after share_memory_().",
    )


def judge_resumed(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: a resumed epoch, without its first batches, in a different order."""
    resumed = [_resumed(loaders) for loaders in passes]
    pairs = [pair for pair in resumed if pair is not None]
    if len(pairs) < len(passes) or len({loader.skipped for loader, _ in pairs}) != 1:
        return []
    loader, untrained = pairs[0]
    return finding_on_loader(
        "DDP506",
        loader,
        f"An epoch is resumed in a different order: of the samples of the first {counted(loader.skipped, 'batch')}, "
        f"which the loop skips, {untrained} had not been trained on. Others are trained on again.",
        line=loader.told or loader.epochs_at,
        evidence=["the previous pass began with samples that differ from the skipped ones"],
        fix="Before the loop that resumes, call set_epoch of the sampler with the epoch that is resumed; or restore "
        "the state of the generator from which the loader shuffles.",
    )


def _resumed(loaders: Sequence[LoaderPass]) -> tuple[LoaderPass, int] | None:
    """Return the pass that resumes an epoch, and its number of untrained skipped samples."""
    trained = [loader for loader in loaders if loader.trains and not loader.replaces]
    for kind in dict.fromkeys((loader.dataset, loader.size) for loader in trained):
        epochs = [loader for loader in trained if (loader.dataset, loader.size) == kind]
        for index, loader in enumerate(epochs):
            if (untrained := _left_by_resuming(epochs[:index], loader, epochs[index + 1 : index + 2])) > 0:
                return loader, untrained
    return None


def _left_by_resuming(earlier: Sequence[LoaderPass], loader: LoaderPass, after: Sequence[LoaderPass]) -> int:
    """Count skipped samples that did not begin the previous pass; 0 if consistent."""
    count = loader.skipped * loader.batch_size
    passed = set(loader.indices[:count])
    # one more batch is no evidence: a prefetching loader takes the next batch early
    if not earlier or not earlier[-1].skipped + 1 < loader.skipped <= earlier[-1].batches or len(passed) < count:
        return 0
    if not all(p.indices for p in (*earlier, *after)):
        return 0
    begun = [index for index, p in enumerate(earlier) if set(p.indices[:count]) <= passed]
    if begun:  # the previous or an earlier pass matches; after an earlier pass, the next passes must match, too
        next_of_it = earlier[begun[-1] + 1 : begun[-1] + 2]
        if not next_of_it or not after or _begin_alike(next_of_it[0], after[0]):
            return 0
    return len(passed - set(earlier[-1].indices[:count]))


def _begin_alike(first: LoaderPass, second: LoaderPass) -> bool:
    size = min(len(first.indices), len(second.indices))
    return set(first.indices[:size]) == set(second.indices[:size])


def judge_restarted(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: training continued after some epochs with the sampler at epoch 0."""
    first = [next((loader for loader in loaders if loader.trains and loader.restored), None) for loaders in passes]
    restarted = [p for p in first if p is not None and _gives_order(p) and p.has_epoch and p.epoch == 0]
    done = [loader for loader in restarted if _goes_on_after_epochs(loader)]
    if len(restarted) < len(passes) or not done or (restored := done[0].restored) is None:
        return []
    loader = done[0]
    far = counted(restored.steps, "optimizer step") if restored.steps else counted(restored.epochs, "epoch")
    return finding_on_loader(
        "DDP506",
        loader,
        f"Training continues after {far}, and {loader.sampler} is at epoch 0 again: the epochs repeat the orders of "
        "the first ones.",
        line=loader.told or loader.epochs_at,
        evidence=[f"an optimizer was restored at {restored.location}"],
        fix="Continue to count epochs from that of the checkpoint, and call set_epoch with the number before each.",
    )


def _gives_order(loader: LoaderPass) -> bool:
    """Return True if the sampler shuffles, by flag or by indices."""
    return loader.shuffles or (not loader.replaces and list(loader.indices) != sorted(loader.indices))


def _goes_on_after_epochs(loader: LoaderPass) -> bool:
    """Return True if the restored training had covered the data at least once."""
    if loader.restored is None or not loader.restored.steps:
        return loader.restored is not None and loader.restored.epochs > 0 and not loader.skipped
    batches = loader.size // loader.replicas // loader.batch_size if loader.replicas else loader.expected
    worked = max(1, loader.batches - loader.skipped)
    return loader.restored.steps * worked >= (batches + (2 if loader.skipped else 0)) * loader.steps > 0


def judge_labels(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: the same samples with different labels on different ranks."""
    labels = [_labels(loaders) for loaders in passes]
    if len(labels) < 2 or not all(labels):
        return []
    common = sorted(set.intersection(*map(set, labels)))
    diffs = [row for row in common if len({rank_labels[row] for rank_labels in labels}) > 1]
    maps = [{rank_labels[row] for row in common} for rank_labels in labels]
    if len(common) < FEWEST_ROWS or 2 * len(diffs) < len(common) or min(map(len, maps)) < 2:
        return []
    for rank_labels in labels[1:]:  # labels of two ranks must correspond one to one
        pairs = {(labels[0][row], rank_labels[row]) for row in common}
        if len(pairs) != len({a for a, _ in pairs}) or len(pairs) != len({b for _, b in pairs}):
            return []
    loader = passes[0][0]
    return finding_on_loader(
        "DDP516",
        loader,
        f"The same samples have different labels on different ranks: {len(diffs)} of {len(common)} that were compared.",
        line=loader.split,
        evidence=["each label of one rank corresponds to one different label of the other"],
    )


def judge_other_values(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP516: the same samples with values that differ between ranks, but not between epochs."""
    first = [loaders[0] for loaders in passes]
    rows = [_by_place(loaders, labels=False) for loaders in passes]
    if len(first) < 2 or not all(rows) or any(loader.draws for loaders in passes for loader in loaders):
        return []
    contents = first[0].samples, first[0].state
    hold_same = bool(first[0].samples) and all((loader.samples, loader.state) == contents for loader in first)
    if not hold_same and hold_own_parts(first):
        return []  # e.g. one label per rank
    for number, rank_rows in enumerate(rows):
        for other_rank, other_rows in enumerate(rows[:number]):
            common = sorted(rank_rows.keys() & other_rows.keys())
            mismatches = [position for position in common if rank_rows[position] != other_rows[position]]
            if len(common) < FEWEST_ROWS or 2 * len(mismatches) < len(common):
                continue
            if not hold_same and not _are_named_alike(passes[number], passes[other_rank], common):
                continue
            reason = "the datasets hold the same samples" if hold_same else "these samples have the same labels"
            return finding_on_loader(
                "DDP516",
                first[0],
                "The same samples have different values on different ranks, the same ones in every epoch: "
                f"{len(mismatches)} of {len(common)} that ranks {other_rank} and {number} have both taken.",
                severity=Severity.WARNING,
                evidence=[f"on all ranks {reason}", "no random numbers are drawn for them"],
                tags=(OTHER_VALUES,),
                fix="Make each sample in the same way on every rank: hash() of a text differs between processes unless "
                "PYTHONHASHSEED is set (zlib.crc32 does not), and so does the order of a set; take statistics of all "
                "of the data, or all_reduce their sums.",
            )
    return []


def _are_named_alike(loaders: Sequence[LoaderPass], others: Sequence[LoaderPass], positions: Sequence[int]) -> bool:
    """Return True if labels show that equal positions are the same samples."""
    labels = _by_place(loaders, labels=True), _by_place(others, labels=True)
    pairs = [(labels[0][position], labels[1].get(position)) for position in positions if position in labels[0]]
    counts = Counter(label for label, _ in pairs)
    chance = sum((count / len(pairs)) ** 2 for count in counts.values())  # probability that one label matches at random
    in_order = sum(a != b for a, b in itertools.pairwise(label for label, _ in pairs)) < 2 * len(counts)
    return all(a == b for a, b in pairs) and bool(pairs) and not in_order and chance ** len(pairs) < _CHANCE


def have_same_labels(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if samples common to all ranks have the same labels."""
    labels = [_labels(loaders) for loaders in passes]
    common = set.intersection(*map(set, labels)) if labels else set()
    equal = all(rank_labels[row] == labels[0][row] for rank_labels in labels for row in common)
    return equal and len(common) >= FEWEST_ROWS and len({labels[0][row] for row in common}) > 1


def _labels(loaders: Sequence[LoaderPass]) -> dict[int, int]:
    """Map rows to labels; empty if a row has several labels."""
    labels: dict[int, int] = {}
    for loader in loaders:
        if len(loader.labels) == len(loader.rows):
            for row, label in zip(loader.rows, loader.labels, strict=True):
                if labels.setdefault(row, label) != label:
                    return {}
    return labels


def _tell_apart(loader: LoaderPass) -> bool:
    """Return True if the rows are enough, and nearly all distinct."""
    return len(loader.rows) >= FEWEST_ROWS and len(set(loader.rows)) >= 0.9 * len(loader.rows)


def _positions(loader: LoaderPass) -> set[int]:
    """Return the dataset positions that the sampler took."""
    if not loader.subset:
        return set(loader.indices)
    positions = {index: number for number, index in enumerate(loader.subset)}
    return {positions.get(index, -1) for index in loader.indices}


def _share_places(first: Sequence[LoaderPass]) -> bool:
    """Return True if the samplers split the same positions between ranks."""
    if all(loader.replicas == len(first) for loader in first):
        return True
    taken = [_positions(loader) for loader in first]
    sizes = {len(loader.subset) or loader.size for loader in first}
    if len(sizes) > 1 or not all(taken) or any(not loader.exhausted for loader in first):
        return False
    (size,) = sizes
    union = set.union(*taken)
    duplicates = sum(map(len, taken)) - len(union)
    most = -(-size // len(first))
    return max(map(len, taken)) <= most and duplicates <= len(first) and len(union) >= size - first[0].batch_size * 2


def _are_own_parts(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if the ranks' datasets are disjoint, not just drawn at random."""
    first = [loaders[0] for loaders in passes]
    if all(loader.subset for loader in first):
        return _disjoint([loader.subset for loader in first])
    if any(loader.subset for loader in first) or not all(_tell_apart(loader) for loader in first):
        return False
    names = set.intersection(*(set(loader.samples) for loader in first))
    disjoint = bool(names) and all(_disjoint([loader.samples[name] for loader in first]) for name in names)
    of_whole = all(loader.whole and (loader.whole < 0 or _is_share(loader, len(first))) for loader in first)
    drawn_alike = first[0].drawn and len({loader.drawn for loader in first}) == 1
    return bool(of_whole or drawn_alike) and _disjoint([p.rows for p in first]) and (disjoint or _give_others(passes))


def deal_repeated(first: Sequence[LoaderPass]) -> bool:
    """Check if samplers repeat each sample on several ranks, which augment it differently."""
    return all(loader.size > len(first) and loader.dealt + len(first) >= 2 * loader.size for loader in first)


def hold_own_parts(first: Sequence[LoaderPass]) -> bool:
    """Return True if the ranks' datasets are disjoint shares of one array."""
    parts = all(loader.whole > 0 and _is_share(loader, len(first)) and _tell_apart(loader) for loader in first)
    return len(first) > 1 and parts and _disjoint([loader.rows for loader in first])


def _is_share(loader: LoaderPass, ranks: int) -> bool:
    return 0 <= loader.whole - ranks * (loader.size - 1) <= 2 * ranks


def _give_others(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if each position is a different sample on each rank."""
    rows = [_by_place(loaders, labels=False) for loaders in passes]
    labels = [_by_place(loaders, labels=True) for loaders in passes]
    for number, rank_rows in enumerate(rows):
        for other_rank, other_rows in enumerate(rows[:number]):
            common = rank_rows.keys() & other_rows.keys()
            if len(common) < FEWEST_ROWS or any(rank_rows[i] == other_rows[i] for i in common):
                return False
            named = [(labels[number][i], labels[other_rank].get(i)) for i in common & labels[number].keys()]
            if len(set(named)) > 1 and all(a == b for a, b in named):
                return False  # ranks transform the same samples differently
    return True


def _by_place(loaders: Sequence[LoaderPass], *, labels: bool) -> dict[int, int]:
    """Map positions to rows or labels; empty if values change or rarely repeat."""
    by_position: dict[int, int] = {}
    repeats = 0
    for loader in loaders:
        values = loader.labels if labels else loader.rows
        for position, value in zip(loader.indices, values, strict=True) if len(values) == len(loader.indices) else ():
            repeats += position in by_position
            if by_position.setdefault(position, value) != value:
                return {}
    return by_position if repeats >= FEWEST_ROWS else {}


def _disjoint(parts: Sequence[Sequence[int]]) -> bool:
    return not any(set(a) & set(b) for number, a in enumerate(parts) for b in parts[:number])


def shared_by_ranks(first: Sequence[LoaderPass], taken: Sequence[Iterable[int]], size: int) -> int:
    """Return the largest overlap of two ranks; 0 if padding explains it."""
    sets = [set(indices) for indices in taken]
    shared = max(len(a & b) for number, a in enumerate(sets) for b in sets[:number])
    at_the_end = max(loader.batch_size for loader in first) * len(first)
    return shared if shared > at_the_end and shared >= _SHARED * size else 0


def finding_on_loader(
    code: str, loader: LoaderPass, message: str, *, line: Location | None = None, **more: Any
) -> list[Finding]:
    """Report at `line`, else where the sampler or loader is made."""
    location = line or loader.made or loader.location
    related = {"loop over the loader": loader.location, f"{loader.sampler or 'loader'} made": loader.made}
    return one_finding(code, (loader.dataset,), message, location=location, related=related, **more)
