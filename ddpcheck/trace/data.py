"""Samples of ranks: passes over loaders, rows, inputs and draws."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import (
    DerivedTable,
    EvaluationInputs,
    Inputs,
    LoaderPass,
    LossDifferentiated,
    OptimizerStep,
)
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by, new_finding, plural
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.replicas import aligned, common_values
from ddpcheck.trace.script_facts import ScriptFacts, entries_of
from ddpcheck.trace.unwrapped_params import Steps
from ddpcheck.trace.view import View

FEWEST_INPUTS = 3  # steps with the same samples on several ranks
MIN_DRAWS = 2  # intervals between optimizer steps in which the same line draws
FEWEST_ROWS = 8  # rows needed to tell samples apart
_SHARED_FRACTION = 0.2  # smaller shared fractions of a rank's samples are chance
_CHANCE_FRACTION = 0.6  # smaller fractions of the overlap of random parts (size / ranks) are duplicates in the data


@dataclass(frozen=True)
class Loader:
    """Passes over matching data loaders of the ranks, by rank in order of time."""

    passes: Sequence[Sequence[LoaderPass]]
    ranks: Sequence[int]

    @property
    def first(self) -> list[LoaderPass]:
        return [rank_passes[0] for rank_passes in self.passes]

    @cached_property
    def has_same_data(self) -> bool:
        return have_same_data(self.first)

    @property
    def has_comparable_rows(self) -> bool:
        """Return True if ranks' samples can be compared by contents, but not by index."""
        by_index = self.has_same_data and all(loader.indices for loader in self.first)
        has_rows = all(has_distinct_rows(loader) and not loader.replaces for loader in self.first)
        return has_rows and not by_index and len(self.first) > 1

    @property
    def num_shared_rows(self) -> int:
        """Number of samples that two ranks share; 0 if unknown or explained by chance."""
        if not self.has_comparable_rows or not all(loader.exhausted for loader in self.first):
            return 0
        rows = [loader.rows for loader in self.first]
        size = min(map(len, rows))
        shared = shared_by_ranks(self.first, rows, size)
        # duplicates in the data are few; parts of different orders share more
        return 0 if self.first[0].size > 0 and shared < _CHANCE_FRACTION * size / len(rows) else shared


def match_loaders(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Loader]:
    """Match the ranks' training loaders by loop line, dataset and order of use.

    The numbers of loaders are ignored: they differ if only rank 0 validates. If each rank has only one training loader,
    these loaders match, even if lines differ because only rank 0 shows a progress bar.
    """
    has_one = all(len({loader.loader for loader in loaders if loader.trains}) == 1 for loaders in passes)
    groups_by_rank = []
    for rank_passes in passes:
        groups: dict[tuple[Location | None, str, int], list[LoaderPass]] = {}
        for loaders in group_by((p for p in rank_passes if p.trains), lambda loader: loader.loader).values():
            key = None if has_one else loaders[0].location, loaders[0].dataset
            groups[*key, sum(group_key[:2] == key for group_key in groups)] = loaders
        groups_by_rank.append(groups)
    return [Loader(groups, ranks or range(len(passes))) for groups in common_values(groups_by_rank).values()]


def have_same_data(passes: Sequence[LoaderPass]) -> bool:
    """Return True if the same index is the same sample on every rank."""
    first, *others = passes
    return all(_has_equal_contents(first, loader) or _has_equal_samples(first, loader) for loader in others)


def _has_equal_contents(first: LoaderPass, second: LoaderPass) -> bool:
    if first.samples and first.samples.keys() == second.samples.keys():
        if all({*first.samples[name]}.isdisjoint(second.samples[name]) for name in first.samples):
            return False  # equal contents below may be labels in the same order
    matches = []  # for each varying part of a sample; augmentation changes inputs, not labels
    for part, rows in first.contents.items():
        common = rows.keys() & second.contents.get(part, {}).keys()
        if len({rows[index] for index in common}) > 1:
            matches.append(all(rows[index] == second.contents[part][index] for index in common))
    return any(matches) if matches else bool(first.digest) and first.digest == second.digest


def _has_equal_samples(first: LoaderPass, second: LoaderPass) -> bool:
    """Check if two ranks' datasets have equal samples at indices that both ranks loaded.

    If loading draws random numbers on both ranks, equal contents of the datasets are enough.
    """
    if first.holds_samples and first.draws and second.draws and first.samples == second.samples:
        return True
    common = len({*first.indices} & {*second.indices})
    shared = len({*first.rows} & {*second.rows})
    return bool(first.samples) and first.samples == second.samples and 2 * shared >= common >= FEWEST_ROWS


def describe_unused_samples(local: Sequence[LocalStep]) -> str:
    """Describe how many samples of the global batch no rank gets, or return ''."""
    batch = Counter(local[0].global_sample_fingerprints)
    on_ranks = Counter(sample for item in local for sample in item.sample_fingerprints)
    missing = sum((batch - on_ranks).values()) if on_ranks.keys() <= batch.keys() else 0
    return f"{missing} of {batch.total()} samples of the global batch are on no rank" if missing else ""


def is_complete_pass(loader: LoaderPass) -> bool:
    """Return True if the loop exhausted the loader or took all expected batches."""
    return loader.exhausted or loader.batches == loader.expected > 0


def first_training_indices(indices: Sequence[int]) -> str:
    return f"{', '.join(map(str, indices[:6]))}{' ...' if len(indices) > 6 else ''}"


def shared_draws(draws: Sequence[Sequence[StepDraw]]) -> list[StepDraw]:
    """Return draws that every rank made from the same global generator state."""
    keys = [{_draw_key(draw) for draw in rank_draws if draw.generator} for rank_draws in draws]
    common = set.intersection(*keys) if keys else set()
    return [draw for draw in draws[-1] if _draw_key(draw) in common] if draws else []


def line_of_selection(draws: Sequence[Sequence[StepDraw]]) -> Location | None:
    """Return the line that seeds or draws random numbers that select samples, or None."""
    choices = [draw for draw in shared_draws(draws) if draw.count > 1 or draw.generator == "cuda"]
    choices.sort(key=lambda draw: ("choice", "any", "noise").index(draw.kind))
    local = [draw for rank_draws in draws for draw in rank_draws if not draw.generator]
    steps = Counter(line for line, _ in {(draw.location, draw.step) for draw in local})
    local.sort(key=lambda d: (("choice", "any", "noise").index(d.kind), -steps[d.location]))  # most steps first
    lines = [draw.seeded_at or draw.location for draw in choices] + [draw.location for draw in local]
    return next((line for line in lines if line is not None), None)


def _draw_key(draw: StepDraw) -> tuple[object, ...]:
    return draw.step, draw.generator, draw.kind, draw.before, draw.after, draw.location


def batches_by_step(inputs: Mapping[int, Sequence[Inputs]]) -> dict[int, dict[int, tuple[int, ...]]]:
    """Return the sorted samples of each forward pass, by rank and step."""
    return {rank: {call.step: tuple(sorted(call.samples)) for call in calls} for rank, calls in inputs.items()}


def common_steps(inputs: Sequence[Sequence[Inputs]]) -> list[list[tuple[Inputs, ...]]]:
    """Return the inputs of steps that every rank recorded: by wrapper, step and rank."""
    by_key = [{(call.wrapper, call.step): call for call in calls if len(call.samples) > 1} for calls in inputs]
    return list(group_by(map(tuple, aligned(by_key)), lambda calls: calls[0].wrapper).values())


def all_inputs_differ(steps: Sequence[Sequence[Inputs]]) -> bool:
    return len(steps) >= MIN_DRAWS and all(len({tuple(sorted(c.samples)) for c in step}) == len(step) for step in steps)


def share_some_inputs(steps: Sequence[Sequence[Inputs]], distinct: int) -> bool:
    """Return True if some input, equal on all ranks, has `distinct` values over steps."""
    count = min((len(call.parts) for step in steps for call in step), default=0)
    return len(steps) >= MIN_DRAWS and any(
        all(len({call.parts[index] for call in step}) == 1 for step in steps)
        and len({step[0].parts[index] for step in steps}) >= distinct
        and all(step[0].parts[index][1] >= len(step[0].samples) for step in steps)
        for index in range(count)
    )


def has_distinct_rows(loader: LoaderPass) -> bool:
    """Return True if there are enough rows, and nearly all are distinct."""
    return len(loader.rows) >= FEWEST_ROWS and len(set(loader.rows)) >= 0.9 * len(loader.rows)


def are_repeated_on_ranks(first: Sequence[LoaderPass]) -> bool:
    """Check if samplers repeat each sample on several ranks (repeated augmentation)."""
    return all(loader.size > len(first) and loader.total_size + len(first) >= 2 * loader.size for loader in first)


def are_disjoint_shares(first: Sequence[LoaderPass]) -> bool:
    """Return True if the ranks' datasets are disjoint shares of one array."""
    parts = all(p.base_rows > 0 and is_one_share(p, len(first)) and has_distinct_rows(p) for p in first)
    return len(first) > 1 and parts and are_disjoint([loader.rows for loader in first])


def is_one_share(loader: LoaderPass, ranks: int) -> bool:
    return 0 <= loader.base_rows - ranks * (loader.size - 1) <= 2 * ranks


def values_by_index(loaders: Sequence[LoaderPass], *, labels: bool) -> dict[int, int]:
    """Map dataset indices to fingerprints of samples or labels; {} if a value changes.

    Also {} if indices are loaded again fewer than `FEWEST_ROWS` times, too few to see changes.
    """
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
    return all(set(a).isdisjoint(b) for a, b in itertools.combinations(parts, 2))


def shared_by_ranks(first: Sequence[LoaderPass], taken: Sequence[Iterable[int]], size: int) -> int:
    """Return the largest overlap of ranks' samples; 0 if padding or chance explains it."""
    shared = max(len(a & b) for a, b in itertools.combinations(map(set, taken), 2))
    padding = max(loader.batch_size for loader in first) * len(first)
    return shared if shared > padding and shared >= _SHARED_FRACTION * size else 0


def finding_on_loader(
    code: str, loader: LoaderPass, message: str, *, line: Location | None = None, **more: Any
) -> list[Finding]:
    """Create a finding at `line`, else at the construction of the sampler or loader."""
    location = line or loader.built_at or loader.location
    related = {"loop over the loader": loader.location, f"{loader.sampler or 'loader'} made": loader.built_at}
    return new_finding(code, (loader.dataset,), message, location=location, related=related, **more)


class LoaderGroup(NamedTuple):
    """Passes over all data loaders of ranks that train together on different samples."""

    passes: Sequence[Sequence[LoaderPass]]  # by rank, in order of time
    ranks: Sequence[int]
    takes_slices: bool = False  # if each rank's forward gets a slice of the loader's batches


class WrapperSamples(NamedTuple):
    """Random draws and inputs of a wrapper, by rank of its process group."""

    draws: Mapping[int, Sequence[StepDraw]]
    inputs: Mapping[int, Sequence[Inputs]]
    evaluated: Mapping[int, Sequence[EvaluationInputs]]


@dataclass(frozen=True)
class Data(View):
    """Samples of a script; sequences are by rank in order of time, unless noted."""

    checks = ("data",)
    groups: Sequence[LoaderGroup]  # by group of ranks that train together
    passes: Sequence[Sequence[LoaderPass]]
    draws: Sequence[Sequence[StepDraw]]  # of ranks with different samples
    inputs: Sequence[Sequence[Inputs]]  # of ranks with different samples
    has_own_samples: bool  # if data loaders give these ranks different samples
    wrappers: Sequence[WrapperSamples]
    losses: Sequence[Sequence[LossDifferentiated]]  # [] if ranks share a model
    optimizers: Sequence[Sequence[Steps]]  # steps with gradients that the script averages itself, by optimizer
    tables: Sequence[Sequence[DerivedTable]]
    compares_gradients: bool = False  # if gradients are known from before the script averages them

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        if facts.trains_separate_models:
            return None
        ranks = facts.training_groups[0] if facts.model_groups or facts.stages or facts.sample_groups else facts.ranks
        orders = [tuple(tuple(entry.indices) for entry in rank.passes if entry.trains) for rank in ranks]
        wrappers = []
        for wrapper in facts.wrappers:
            if facts.sample_groups:
                wrapper = replace(wrapper, ranks=[rank for rank in wrapper.ranks if rank in ranks])
            numbers = [rank.started.rank for rank in wrapper.ranks]
            wrappers.append(
                WrapperSamples(
                    {rank.started.rank: entries_of(rank, StepDraw) for rank in wrapper.ranks},
                    dict(zip(numbers, wrapper.events(Inputs), strict=True)),
                    dict(zip(numbers, wrapper.events(EvaluationInputs), strict=True)),
                )
            )
        by_hand = not facts.wrappers and not facts.model_groups and not facts.sample_groups
        return cls(
            [
                LoaderGroup([r.passes for r in group], [r.started.rank for r in group], _takes_slices(group))
                for group in facts.training_groups
            ],
            facts.passes,
            [entries_of(rank, StepDraw) for rank in ranks],
            [entries_of(rank, Inputs) for rank in ranks],
            len(set(orders)) == len(orders),
            wrappers,
            [] if facts.model_groups else facts.events(LossDifferentiated),
            [optimizer.steps for optimizer in facts.optimizers] if by_hand else [],
            facts.events(DerivedTable),
            by_hand and any(step.allreduce_inputs for step in entries_of(facts.ranks[0], OptimizerStep)),
        )

    @property
    def repeats_samples(self) -> bool:
        """Check if ranks get disjoint datasets, or samplers repeat each sample on several ranks."""
        trained = [first for rank_passes in self.passes for first in [p for p in rank_passes if p.trains][:1]]
        return len(trained) == len(self.passes) and (are_disjoint_shares(trained) or are_repeated_on_ranks(trained))

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        num_passes = sum(entry.trains for entry in self.passes[0])
        subjects = {
            f"the samples of {plural(num_passes, 'pass')} over loaders": num_passes,
            f"the inputs of {plural(len(self.inputs[0]), 'forward pass')}": len(self.inputs[0]) >= FEWEST_INPUTS,
            plural(len(self.tables[0]), "table"): self.tables[0],
            "the gradients before they are averaged": self.compares_gradients,
        }
        if compared := ", ".join(words for words, present in subjects.items() if present):
            yield f"no fault in {compared}"


def _takes_slices(ranks: Sequence[RankTrace]) -> bool:
    rows = [len(entry.samples) for entry in entries_of(ranks[0], Inputs)]
    sizes = [entry.batch_size for entry in ranks[0].passes if entry.trains]
    return bool(rows and sizes) and 1 < max(rows) and max(rows) * len(ranks) <= max(sizes)


def is_repeated_by_workers(loader: LoaderPass) -> bool:
    """Return True if every worker of a loader iterates over the whole `IterableDataset`.

    False if each worker iterates over only its shard, even several times. The order of samples shows the difference.
    """
    counts = Counter(loader.rows)
    if loader.workers < 2 or loader.size >= 0:
        return False
    if not loader.exhausted:
        size = loader.batch_size * loader.workers
        rounds = [loader.rows[begun : begun + size] for begun in range(0, len(loader.rows) - size + 1, size)]
        repeats = all(round_rows == round_rows[: loader.batch_size] * loader.workers for round_rows in rounds)
        return repeats and len(set(rounds)) > 1 and len(counts) >= FEWEST_ROWS
    if len(counts) < FEWEST_ROWS or set(counts.values()) != {loader.workers}:
        return False
    if len(set(loader.rows[: len(counts)])) == len(counts):
        return False  # several passes over the stream, one after another
    rows = iter(loader.rows)  # the workers alternate by batches; the last batches may be smaller
    by_worker: list[set[int]] = [set() for _ in range(loader.workers)]
    for begun in range(0, len(counts), loader.batch_size):
        for worker_rows in by_worker:
            worker_rows |= set(itertools.islice(rows, min(loader.batch_size, len(counts) - begun)))
    return all(2 * len(worker_rows) > len(counts) for worker_rows in by_worker)


def group_equal_ranks(
    samples_by_rank: Mapping[int, Sequence[tuple[int, ...]]], count: int
) -> list[tuple[list[int], int]]:
    """Group ranks with equal samples; return (ranks, number of first steps with equal samples)."""
    groups = []
    for ranks in group_by(samples_by_rank, lambda rank: tuple(samples_by_rank[rank][:FEWEST_INPUTS])).values():
        by_step = [{samples_by_rank[rank][index] for rank in ranks} for index in range(count)]
        equal_steps = next((index for index, samples in enumerate(by_step) if len(samples) > 1), count)
        if len(ranks) > 1 and equal_steps >= FEWEST_INPUTS and len(set.union(*by_step[:equal_steps])) > 1:
            groups.append((ranks, equal_steps))
    return groups
