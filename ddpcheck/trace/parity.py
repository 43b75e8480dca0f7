"""Quantities of a run on ranks and of a single process, side by side."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpcheck.findings.evidence.parity import (
    EvaluationTraced,
    NotReplayed,
    NumbersShown,
    ParityStep,
    PassTaken,
    TensorsSaved,
)
from ddpcheck.findings.report import Location
from ddpcheck.stream.rank_log import WatchedRank
from ddpcheck.trace.script_facts import entries_of

EQUAL = 1e-4  # relative; smaller differences need no noise run


MULTIPLE = 4.0  # times the measured noise; smaller differences are undecided


FLOOR = 1e-5  # relative; rounding that one reordering of samples may not show


_NEAR = 1e-3  # relative; evaluation numbers may be rounded


SMALL = 1e-2  # relative noise up to which a comparison is conclusive


_UNKNOWN = 0.5  # relative noise above which a quantity is useless


_SAME_ROWS = 1e-5  # tolerance of a feature sum, per row


_FEWEST_DIGITS = 100  # times the last digit; smaller numbers may equal a loss by chance


_LARGEST = 1e30


_Key = tuple[str, str, int]


_Line = tuple[int, str, int, str, str]


_Step = tuple[list[ParityStep], ParityStep, ParityStep | None]  # ranks, single process, noise run


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of one step or place, on ranks and in a single process."""

    ranks: float
    single: float
    difference: float  # relative
    noise: float  # relative, measured by the noise run
    padding: float = 0.0  # relative; share of samples that evaluation repeats on ranks

    @property
    def differs(self) -> bool:
        """Check if the difference exceeds the noise."""
        return not self.difference <= max(FLOOR, MULTIPLE * self.noise, self.padding) and self.noise < _UNKNOWN

    @property
    def is_equal(self) -> bool:
        """Check if the difference is within the noise, and the noise is small."""
        noise = MULTIPLE * self.noise if self.noise <= SMALL else 0.0
        return not self.differs and self.difference <= max(EQUAL, noise)

    @property
    def is_padded(self) -> bool:
        """Check if repeated evaluation samples may explain the whole difference."""
        return not self.differs and self.difference > max(EQUAL, MULTIPLE * self.noise)

    @property
    def ratio(self) -> float:
        """Ratio `ranks / single`; NaN if `single` is 0."""
        return self.ranks / self.single if self.single else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs of one script, and optionally a third run that measures noise."""

    ranks: Sequence[WatchedRank]
    single: WatchedRank
    noise: WatchedRank | None = None
    other_rank: WatchedRank | None = None  # single process with another rank number

    def steps(self) -> list[_Step]:
        """Return the steps that both runs made on the same samples, in order."""
        if self.has_other_model or self.computes_with_rank:
            return []
        return [*itertools.takewhile(lambda step: self._have_same_samples(*step[:2]), self._steps_of_both)]

    def next_steps(self) -> list[_Step]:
        """Return each optimizer's first step after `steps`; only its parameters are comparable."""
        steps = self.steps()
        following = {(single.optimizer, single.count + 1) for _, single, _ in steps}
        return [step for step in self._steps_of_both[len(steps) :] if (step[1].optimizer, step[1].count) in following]

    @cached_property
    def _steps_of_both(self) -> list[_Step]:
        by_rank = [{(s.optimizer, s.count): s for s in entries_of(rank, ParityStep)} for rank in self.ranks]
        noise = {(s.optimizer, s.count): s for s in entries_of(self.noise, ParityStep)} if self.noise else {}
        keys = [((single.optimizer, single.count), single) for single in entries_of(self.single, ParityStep)]
        return [
            ([steps[key] for steps in by_rank], single, noise.get(key))
            for key, single in keys
            if all(key in steps for steps in by_rank)
        ]

    def _have_same_samples(self, rank_steps: Sequence[ParityStep], single: ParityStep) -> bool:
        """Check if forward got the same rows; without wrappers, if replay was complete."""
        sums = [math.fsum(column) for column in zip(*(step.samples for step in rank_steps), strict=True)]
        rows = max(sums[-1], single.samples[-1])
        if not min(sums[-1], single.samples[-1]):
            return not self.is_partly_replayed
        return all(abs(a - b) <= _SAME_ROWS * rows for a, b in zip(sums, single.samples, strict=True))

    @cached_property
    def has_other_model(self) -> bool:
        """Check if the single process's initial parameters differ from rank 0's."""
        first_steps = [next(iter(entries_of(rank, ParityStep)), None) for rank in (*self.ranks, self.single)]
        *rank_steps, single = first_steps
        if single is None or rank_steps[0] is None or single.sharded:
            return False
        if single.elements != rank_steps[0].elements:
            return True
        pairs = zip(rank_steps[0].values, single.values, strict=True)
        return not all(math.isclose(a, b, rel_tol=FLOOR, abs_tol=FLOOR) for a, b in pairs)

    @cached_property
    def is_partly_replayed(self) -> bool:
        """Check if some script inputs could not be replayed in the single process."""
        return bool(entries_of(self.single, NotReplayed))

    @cached_property
    def computes_with_rank(self) -> bool:
        """Check if a single process's gradients change with its rank number."""
        if self.other_rank is None:
            return False
        steps = zip(*(entries_of(rank, ParityStep) for rank in (self.other_rank, self.single)), strict=False)
        for other, single in steps:
            if not math.isfinite(math.hypot(*other.norms)):
                return False
            if not all(math.isclose(a, b, rel_tol=SMALL) for a, b in zip(other.norms, single.norms, strict=False)):
                return True
        return False

    @cached_property
    def padding(self) -> float:
        """Share of evaluation samples that ranks repeat to get equal shard sizes."""
        rows = Counter[str]()
        for entry in (entry for rank in self.ranks for entry in entries_of(rank, PassTaken) if not entry.trains):
            rows[entry.loader] += entry.rows
        padded = [p for p in entries_of(self.single, PassTaken) if 0 < p.rows < rows[p.loader] < 2 * p.rows]
        return max((rows[p.loader] / p.rows - 1 for p in padded), default=0.0)

    @property
    def has_same_samples(self) -> bool:
        """Check if all steps that both runs made are compared."""
        return len(self.steps()) >= min(len(entries_of(rank, ParityStep)) for rank in (self.ranks[0], self.single))

    def gradients_of(self, ranks: Sequence[WatchedRank], steps: Sequence[ParityStep]) -> _Gradients:
        """Return the gradients of one step on some ranks, with shards combined."""
        norms: dict[str, float] = {}
        count = sum(not norm < 0 for norm in steps[0].norms)
        for rank, step in zip(ranks, steps, strict=True):
            names = self._names.get((rank.started.rank, rank.started.world_size, step.optimizer), ())
            for name, norm in zip(names, step.norms, strict=False):
                if not norm < 0:  # or NaN
                    norms[name] = math.hypot(norms.get(name, 0.0), norm) if step.sharded else norms.get(name, norm)
        return _Gradients(norms, steps[0].gradient if len(norms) == count else ())  # else ranks hold parts of the model

    def factor_of(self, rank_steps: Sequence[ParityStep], single: ParityStep) -> str:
        """Return the world size factor of all gradients in words, or ''."""
        actual, expected = self.gradients_of(self.ranks, rank_steps), self.gradients_of([self.single], [single])
        for factor, words in ((self.world_size, str(self.world_size)), (1 / self.world_size, f"1/{self.world_size}")):
            scaled = _Gradients(
                {name: factor * norm for name, norm in expected.norms.items()}, [factor * x for x in expected.sketch]
            )
            if _distance(actual, scaled) <= _NEAR:
                return words
        return ""

    def names_of(self, rank: WatchedRank, optimizer: int) -> tuple[str, ...]:
        """Return the names of an optimizer's parameters."""
        return self._names.get((rank.started.rank, rank.started.world_size, optimizer), ())

    @cached_property
    def _names(self) -> dict[tuple[int, int, int], tuple[str, ...]]:
        """Parameter names by (rank, world size, optimizer); rank 0's if sizes match."""
        runs = [*self.ranks, self.single, *filter(None, [self.noise])]
        steps = [(rank.started, step) for rank in runs for step in entries_of(rank, ParityStep) if step.names]
        names_by_optimizer = {(step.optimizer, step.elements): step.names for _, step in reversed(steps)}
        return {
            (started.rank, started.world_size, step.optimizer): names_by_optimizer[step.optimizer, step.elements]
            for started, step in steps
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks[0].started.world_size


def parameters(comparison: Comparison) -> list[Quantity]:
    """Compare the parameters before each step and next step; empty if sharded."""
    quantities, largest = [], 0.0
    # Without a noise run, less is noise; different samples may result from different parameters.
    threshold = 0.0 if comparison.noise is not None else EQUAL if comparison.has_same_samples else FLOOR
    for rank_steps, single, noise in [*comparison.steps(), *comparison.next_steps()]:
        if single.sharded or len(rank_steps[0].values) != len(single.values):
            return []
        actual, expected = rank_steps[0].values, single.values
        size = math.hypot(*expected) or 1.0
        largest = max(largest, math.dist(expected, noise.values) / size if noise is not None else 0.0)
        difference = math.dist(actual, expected) / size
        quantities.append(Quantity(math.hypot(*actual), size, difference if difference > threshold else 0.0, largest))
    return quantities


def gradients(comparison: Comparison) -> list[Quantity]:
    """Compare the gradients of each step that both runs made."""
    quantities, largest = [], 0.0
    for rank_steps, single, noise in comparison.steps():
        actual, expected = (
            comparison.gradients_of(comparison.ranks, rank_steps),
            comparison.gradients_of([comparison.single], [single]),
        )
        if noise is not None and comparison.noise is not None:
            largest = max(largest, _distance(expected, comparison.gradients_of([comparison.noise], [noise])))
        quantities.append(Quantity(actual.norm, expected.norm, _distance(actual, expected), largest))
    return quantities


@dataclass(frozen=True, slots=True)
class _Gradients:
    norms: Mapping[str, float]  # by parameter name
    sketch: Sequence[float] = ()  # of all gradients; empty if partial

    @property
    def norm(self) -> float:
        return math.hypot(*self.norms.values())


def _distance(actual: _Gradients, expected: _Gradients) -> float:
    """Return the distance between gradients, relative to the larger norm."""
    scale = max(actual.norm, expected.norm)
    if not math.isfinite(scale):
        return 0.0 if math.isfinite(actual.norm) == math.isfinite(expected.norm) else math.inf
    names = {*actual.norms, *expected.norms}
    difference = math.hypot(*(actual.norms.get(name, 0.0) - expected.norms.get(name, 0.0) for name in names))
    if [*actual.norms] == [*expected.norms] and len(actual.sketch) == len(expected.sketch):
        difference = max(difference, math.dist(actual.sketch, expected.sketch))
    return difference / scale if scale else 0.0


@dataclass(frozen=True, slots=True)
class Shown:
    """A number that both runs show at the same place."""

    entry: NumbersShown  # of rank 0
    place: int  # index of the number in the text
    quantity: Quantity
    is_local: bool = False  # if computed from rank 0's losses only, or different on other ranks

    @property
    def source(self) -> tuple[str, str, int]:
        """Line, text and index of the number, equal in each epoch."""
        return str(self.entry.location), self.entry.text, self.place


def shown_numbers(comparison: Comparison) -> list[Shown]:
    """Return the numbers that both runs show, in order."""
    entries, single_entries = _by_place(comparison.ranks[0]), _by_place(comparison.single)
    noise = _by_place(comparison.noise) if comparison.noise is not None else {}
    other_ranks = [_by_place(rank) for rank in comparison.ranks[1:]]
    losses = [(s.count, loss) for s in entries_of(comparison.ranks[0], ParityStep) for loss in s.losses]
    runs = comparison.ranks[0], comparison.single
    rates = [[rate for step in entries_of(run, ParityStep) for rate in step.rates] for run in runs]
    shown, steps_before = [], dict[_Key, int]()
    for key, entry in entries.items():
        since, steps_before[(*key[:2], 0)] = steps_before.get((*key[:2], 0), 0), entry.steps
        single_entry = single_entries.get(key)
        if single_entry is None or len(single_entry.numbers) != len(entry.numbers):
            continue
        rerun = noise.get(key)
        window = [loss for step, loss in losses if since <= step < entry.steps]
        for place, (text, single) in enumerate(zip(entry.numbers, single_entry.numbers, strict=True)):
            if place in entry.rates or _is_rate((text, single), rates):
                continue
            noise_text = rerun.numbers[place] if rerun is not None and len(rerun.numbers) > place else single
            texts = [rank_entries[key].numbers[place] for rank_entries in other_ranks if key in rank_entries]
            local = any(other != text for other in texts) or _is_of_losses(text, window) or place in entry.known
            padding = comparison.padding if entry.evaluates else 0.0
            shown.append(Shown(entry, place, _quantity(text, single, noise_text, padding), local))
    return shown


def _by_place(rank: WatchedRank) -> dict[_Key, NumbersShown]:
    """Return entries by line, text and number of earlier occurrences."""
    entries: dict[_Key, NumbersShown] = {}
    for entry in entries_of(rank, NumbersShown):
        occurrence = 0
        while (key := (str(entry.location), f"{entry.how} {entry.text}", occurrence)) in entries:
            occurrence += 1
        entries[key] = entry
    return entries


def _quantity(text: str, single_text: str, noise_text: str, padding: float) -> Quantity:
    actual, expected, rerun = float(text), float(single_text), float(noise_text)
    scale = max(abs(actual), abs(expected)) or 1.0
    digit = 1.5 * max(map(_last_digit, (text, single_text)))
    difference = max(0.0, abs(actual - expected) - digit) / scale
    largest = max(abs(expected), abs(rerun))
    changed = abs(expected - rerun) / (largest if largest > FLOOR * scale else scale)
    return Quantity(actual, expected, difference, changed, padding)


def _last_digit(text: str) -> float:
    """Return the unit of the last digit, or 0.0 without decimals."""
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    return 0.0 if not places else 10.0 ** (int(exponent or 0) - places)


def _is_rate(texts: Sequence[str], rates: Sequence[Sequence[float]]) -> bool:
    """Check if numbers are learning rates, or their means, scaled between runs."""
    pairs = [(float(text), _last_digit(text), lrs) for text, lrs in zip(texts, rates, strict=True) if lrs]
    ends = {max(lrs) for _, _, lrs in pairs}
    return len(ends) > 1 and all(min(lrs) - digit <= value <= max(lrs) + digit for value, digit, lrs in pairs)


def _is_of_losses(text: str, losses: Sequence[float]) -> bool:
    """Check if a number is the last, mean or sum of `losses`."""
    value, digit = float(text), _last_digit(text)
    losses = [loss for loss in losses if abs(loss) < _LARGEST]
    if not losses or not digit or abs(value) < _FEWEST_DIGITS * digit:
        return False
    total = math.fsum(losses)
    candidates = (losses[-1], total / len(losses), total)
    return any(abs(value - candidate) <= digit for candidate in candidates)


def first_unequal(comparison: Comparison, steps: range, difference: float = _NEAR) -> tuple[Location, str] | None:
    """Return the first line and variable of an evaluation that differs.

    A number is equal if it, or its sum, mean, maximum or minimum over ranks, is the single process's.

    Args:
        comparison: The runs.
        steps: Numbers of optimizer steps after which evaluations are compared.
        difference: Relative difference of the number computed from the variable.
    """
    *values_by_rank, single_values = (_last_values(rank, steps) for rank in (*comparison.ranks, comparison.single))
    noise = _last_values(comparison.noise, steps) if comparison.noise else single_values
    for key, value in values_by_rank[0].items():
        on_ranks = [numbers for values in values_by_rank if (numbers := values.get(key)) is not None]
        single = single_values.get(key, ())
        if {*map(len, (noise.get(key, ()), *on_ranks))} != {len(single)} or not single:
            continue
        if single == (1.0,) and {*on_ranks} == {(comparison.world_size,)}:
            continue
        scale = max(map(abs, single)) or 1.0
        changed = max(abs(a - b) for a, b in zip(noise[key], single, strict=True)) / scale
        allowed = max(min(_NEAR, difference / MULTIPLE), MULTIPLE * changed) * scale
        if changed > SMALL or any(math.dist(reduced, single) <= allowed for reduced in _reductions(on_ranks)):
            continue  # a time or random number, or equal
        copies = (other for other, copied in values_by_rank[0].items() if copied == value and value[0] % 1)
        path, line, _, name = next(copies, key)[1:]
        return Location(path, line), name
    return None


def line_of_number(rank: WatchedRank, steps: range, text: str) -> tuple[Location, str] | None:
    """Return the evaluation line and variable that first compute a shown number."""
    digit = _last_digit(text)
    for (_, path, line, _, name), value in _last_values(rank, steps).items():
        if len(value) == 1 and abs(value[0] - float(text)) <= digit < abs(value[0]) / _FEWEST_DIGITS:
            return Location(path, line), name
    return None


def _last_values(rank: WatchedRank, steps: range) -> dict[_Line, tuple[float, ...]]:
    """Return the last value of each variable by evaluation line, in order.

    Earlier values are dropped: loops assign a variable a different number of times on each rank.
    """
    last_values: dict[_Line, tuple[float, ...]] = {}
    for traced in entries_of(rank, EvaluationTraced):
        for value in traced.values if traced.steps in steps else ():
            key = traced.steps, value.path, value.line, value.function, value.name
            last_values.pop(key, None)
            last_values[key] = value.numbers
    return last_values


def _reductions(numbers: Sequence[tuple[float, ...]]) -> Iterator[list[float]]:
    """Yield the maximum, minimum and, unless already reduced, sum and mean over ranks.

    Numbers equal on all ranks already cover all samples, except counts.
    """
    for extreme in (max, min):
        yield [extreme(column) for column in zip(*numbers, strict=True)]
    if len(set(numbers)) == 1 and any(number % 1 for number in numbers[0]):
        return
    sums = [math.fsum(column) for column in zip(*numbers, strict=True)]
    yield sums
    yield [total / len(numbers) for total in sums]


def saved_states(rank: WatchedRank) -> dict[tuple[str, int], TensorsSaved]:
    """Return a rank's saved tensors by line and number of earlier saves."""
    states: dict[tuple[str, int], TensorsSaved] = {}
    for entry in entries_of(rank, TensorsSaved):
        count = sum(line == str(entry.location) for line, _ in states)
        states[str(entry.location), count] = entry
    return states


def values_that_differ(saved: TensorsSaved, single: TensorsSaved, rerun: TensorsSaved | None) -> list[str]:
    """Return names of saved tensors whose norms differ beyond noise.

    Noise is the largest change of several norms, because a single norm may stay equal by chance.
    """
    largest = dict[str, float]()  # by last part of the name, such as "exp_avg"
    for name, norms in single.norms.items():
        kind = name.rpartition(".")[2]
        largest[kind] = max(largest.get(kind, 0.0), norms[0])
    names = []
    for name in saved.norms.keys() & single.norms.keys():
        (a, *_), ref = saved.norms[name], single.norms[name]
        noisy = rerun.norms.get(name, ref) if rerun is not None else ref
        scale, rounding = max(abs(a), abs(ref[0])) or 1.0, FLOOR * largest[name.rpartition(".")[2]]
        noise = max((abs(x - y) / (max(x, y) or 1.0) for x, y in zip(ref, noisy, strict=True)), default=0.0)
        if Quantity(a, ref[0], (abs(a - ref[0]) - rounding) / scale, noise).differs:
            names.append(name)
    return sorted(names)
