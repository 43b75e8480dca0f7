"""Samples of ranks: passes over loaders, rows, inputs and draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, one_finding

FEWEST_INPUTS = 3  # steps with the same samples on several ranks


def load_the_same_data(passes: Sequence[LoaderPass]) -> bool:
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
    return bool(first.samples) and first.samples == second.samples and 2 * shared >= common >= FEWEST_ROWS


def describe_left_out(local: Sequence[LocalStep]) -> str:
    """Describe the samples of the global batch that are on no rank, or return '' (also if ranks create samples)."""
    batch = Counter(local[0].global_sample_fingerprints)
    on_ranks = Counter(sample for item in local for sample in item.sample_fingerprints)
    missing = sum((batch - on_ranks).values()) if on_ranks.keys() <= batch.keys() else 0
    return f"{missing} of {batch.total()} samples of the global batch are on no rank" if missing else ""


def is_whole_pass(loader: LoaderPass) -> bool:
    """Return True if all batches were taken (loop exhausted or `expected` reached)."""
    return loader.exhausted or loader.batches == loader.expected > 0


def first_training_indices(indices: Sequence[int]) -> str:
    return f"{', '.join(map(str, indices[:6]))}{' ...' if len(indices) > 6 else ''}"


MIN_DRAWS = 2  # intervals between optimizer steps in which the same line draws


def shared_draws(draws: Sequence[Sequence[StepDraw]]) -> list[StepDraw]:
    """Return draws that every rank made from the same global generator state."""
    keys = [{_key(draw) for draw in rank_draws if draw.generator} for rank_draws in draws]
    common = set.intersection(*keys) if keys else set()
    return [draw for draw in draws[-1] if _key(draw) in common] if draws else []


def line_of_selection(draws: Sequence[Sequence[StepDraw]]) -> Location | None:
    """Return the seed or draw line that makes all ranks draw equal samples."""
    choices = [draw for draw in shared_draws(draws) if draw.count > 1 or draw.generator == "cuda"]
    choices.sort(key=lambda draw: ("choice", "any", "noise").index(draw.kind))
    local = [draw for rank_draws in draws for draw in rank_draws if not draw.generator]
    steps = Counter(line for line, _ in {(draw.location, draw.step) for draw in local})
    local.sort(key=lambda d: (("choice", "any", "noise").index(d.kind), -steps[d.location]))  # most steps first
    lines = [draw.seeded or draw.location for draw in choices] + [draw.location for draw in local]
    return next((line for line in lines if line is not None), None)


def _key(draw: StepDraw) -> tuple[object, ...]:
    return draw.step, draw.generator, draw.kind, draw.before, draw.after, draw.location


def common_steps(inputs: Sequence[Sequence[Inputs]]) -> list[list[tuple[Inputs, ...]]]:
    """Return by wrapper the inputs of all ranks in the same step."""
    by_key = [{(call.wrapper, call.step): call for call in calls if len(call.samples) > 1} for calls in inputs]
    common = sorted(set.intersection(*map(set, by_key))) if by_key else []
    wrappers = dict.fromkeys(wrapper for wrapper, _ in common)
    return [[tuple(calls[key] for calls in by_key) for key in common if key[0] == w] for w in wrappers]


def all_inputs_differ(steps: Sequence[Sequence[Inputs]]) -> bool:
    return len(steps) >= MIN_DRAWS and all(
        len({tuple(sorted(call.samples)) for call in step}) == len(step) for step in steps
    )


def share_some_inputs(steps: Sequence[Sequence[Inputs]], distinct: int) -> bool:
    """Return True if an input tensor is equal on all ranks and varies enough."""
    count = min((len(call.parts) for step in steps for call in step), default=0)
    return len(steps) >= MIN_DRAWS and any(
        all(len({call.parts[index] for call in step}) == 1 for step in steps)
        and len({step[0].parts[index] for step in steps}) >= distinct
        and all(step[0].parts[index][1] >= len(step[0].samples) for step in steps)
        for index in range(count)
    )


_SHARED = 0.2  # smaller shared fractions of a rank's samples are chance


_OF_CHANCE = 0.6  # fraction of the overlap that random parts would have (size / ranks)


OTHER_VALUES = "values by rank"  # tag of findings that a differing derived table may explain


FEWEST_ROWS = 8  # rows needed to tell samples apart


SPLIT_STREAM = (
    "Split the stream in the dataset's __iter__ by rank and world size, and by get_worker_info() if the loader has "
    "workers; if it shuffles before the split, use the same seed on every rank."
)


def judge_rows(passes: Sequence[Sequence[LoaderPass]], *, same_data: bool) -> list[Finding]:
    """DDP505 and 516: samples shared between ranks, each with its own data or stream."""
    first = [loaders[0] for loaders in passes]
    by_index = same_data and all(loader.indices for loader in first)  # indices are stronger evidence
    if by_index or len(first) < 2 or not all(has_distinct_rows(p) for p in first) or any(p.replaces for p in first):
        return []
    rows = [list(loader.rows) for loader in first]
    if all(rank_rows == rows[0] for rank_rows in rows):
        return finding_on_loader(
            "DDP505",
            first[0],
            "Every rank takes the same samples in the same order from the loader, so together they do the work of one.",
            evidence=[f"{counted(len(rows[0]), 'sample')} of the first epoch are equal, by their contents"],
            fix=SPLIT_STREAM if first[0].size < 0 else "",
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
            "DDP505", first[0], f"{message}, by their contents.", severity=Severity.WARNING, fix=SPLIT_STREAM
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


def has_distinct_rows(loader: LoaderPass) -> bool:
    """Return True if the rows are enough, and nearly all distinct."""
    return len(loader.rows) >= FEWEST_ROWS and len(set(loader.rows)) >= 0.9 * len(loader.rows)


def deal_repeated(first: Sequence[LoaderPass]) -> bool:
    """Check if samplers repeat each sample on several ranks, which augment it differently."""
    return all(loader.size > len(first) and loader.dealt + len(first) >= 2 * loader.size for loader in first)


def hold_own_parts(first: Sequence[LoaderPass]) -> bool:
    """Return True if the ranks' datasets are disjoint shares of one array."""
    parts = all(loader.whole > 0 and is_one_share(loader, len(first)) and has_distinct_rows(loader) for loader in first)
    return len(first) > 1 and parts and are_disjoint([loader.rows for loader in first])


def is_one_share(loader: LoaderPass, ranks: int) -> bool:
    return 0 <= loader.whole - ranks * (loader.size - 1) <= 2 * ranks


def rows_by_position(loaders: Sequence[LoaderPass], *, labels: bool) -> dict[int, int]:
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


def are_disjoint(parts: Sequence[Sequence[int]]) -> bool:
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
