"""Comparison of a script on several ranks with a single process on the same samples, number by number.

Rounding and random numbers have no threshold here: a second run in a single process, on the samples in another order
and with other random numbers, has measured them. What differs by a small multiple of that is not decided.
"""

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
from ddpcheck.judge.script_facts import entries_of
from ddpcheck.stream.rank_log import WatchedRank

EQUAL = 1e-4  # relative; what is nearer is not measured any further
MULTIPLE = 4.0  # of measured noise, up to which a difference is not decided
FLOOR = 1e-5  # relative, of rounding that one other order of the samples has not shown
_NEAR = 1e-3  # relative, of numbers of an evaluation, which may be rounded
SMALL = 1e-2  # noise, relative, up to which a comparison says something
_UNKNOWN = 0.5  # noise, relative, above which a quantity says nothing
_SAME_ROWS = 1e-5  # of a feature, for each row
_FEWEST_DIGITS = 100  # of the last digit, from which a number is not equal to a loss by chance
_LARGEST = 1e30
_Key = tuple[str, str, int]
_Line = tuple[int, str, int, str, str]
_Step = tuple[list[ParityStep], ParityStep, ParityStep | None]  # of all ranks, of one process, and of its noise


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of one step or place, on the ranks and in a single process."""

    ranks: float
    single: float
    difference: float  # relative
    noise: float  # relative, as far as it was measured
    padding: float = 0.0  # relative, of samples that an evaluation on ranks takes twice

    @property
    def differs(self) -> bool:
        """Return if the difference is more than noise."""
        return not self.difference <= max(FLOOR, MULTIPLE * self.noise, self.padding) and self.noise < _UNKNOWN

    @property
    def is_equal(self) -> bool:
        """Return if there is no more than noise between both, and noise is small."""
        noise = MULTIPLE * self.noise if self.noise <= SMALL else 0.0
        return not self.differs and self.difference <= max(EQUAL, noise)

    @property
    def is_padded(self) -> bool:
        """Return if samples that an evaluation repeats may be all that is between both."""
        return not self.differs and self.difference > max(EQUAL, MULTIPLE * self.noise)

    @property
    def ratio(self) -> float:
        """The factor by which the ranks' number is the larger one; NaN if there is none."""
        return self.ranks / self.single if self.single else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs of one script, and perhaps a third one that measures noise."""

    ranks: Sequence[WatchedRank]
    single: WatchedRank
    noise: WatchedRank | None = None
    other_rank: WatchedRank | None = None  # a single process that takes itself for another rank

    def steps(self) -> list[_Step]:
        """Return the steps that both runs have made on the same samples, in order."""
        if self.has_other_model or self.computes_with_rank:
            return []
        return [*itertools.takewhile(lambda step: self._have_same_samples(*step[:2]), self._steps_of_both)]

    def next_steps(self) -> list[_Step]:
        """Return the first step of each optimizer after `steps`, of which only its parameters are those of `steps`."""
        steps = self.steps()
        following = {(alone.optimizer, alone.count + 1) for _, alone, _ in steps}
        return [step for step in self._steps_of_both[len(steps) :] if (step[1].optimizer, step[1].count) in following]

    @cached_property
    def _steps_of_both(self) -> list[_Step]:
        by_rank = [{(s.optimizer, s.count): s for s in entries_of(rank, ParityStep)} for rank in self.ranks]
        noise = {(s.optimizer, s.count): s for s in entries_of(self.noise, ParityStep)} if self.noise else {}
        keys = [((alone.optimizer, alone.count), alone) for alone in entries_of(self.single, ParityStep)]
        return [
            ([steps[key] for steps in by_rank], alone, noise.get(key))
            for key, alone in keys
            if all(key in steps for steps in by_rank)
        ]

    def _have_same_samples(self, of_ranks: Sequence[ParityStep], alone: ParityStep) -> bool:
        """Return if forward was given the same rows; without wrappers, if all that entered the script was replayed."""
        sums = [math.fsum(column) for column in zip(*(one.samples for one in of_ranks), strict=True)]
        rows = max(sums[-1], alone.samples[-1])
        if not min(sums[-1], alone.samples[-1]):
            return not self.is_partly_replayed
        return all(abs(a - b) <= _SAME_ROWS * rows for a, b in zip(sums, alone.samples, strict=True))

    @cached_property
    def has_other_model(self) -> bool:
        """Return if a single process begins with other parameters than rank 0, or with parameters of other shapes."""
        first = [next(iter(entries_of(rank, ParityStep)), None) for rank in (*self.ranks, self.single)]
        *of_ranks, alone = first
        if alone is None or of_ranks[0] is None or alone.sharded:
            return False
        if alone.elements != of_ranks[0].elements:
            return True
        pairs = zip(of_ranks[0].values, alone.values, strict=True)
        return not all(math.isclose(a, b, rel_tol=FLOOR, abs_tol=FLOOR) for a, b in pairs)

    @cached_property
    def is_partly_replayed(self) -> bool:
        """Return if a single process was not given all that entered the script on the ranks."""
        return bool(entries_of(self.single, NotReplayed))

    @cached_property
    def computes_with_rank(self) -> bool:
        """Return if a single process has other gradients if it takes itself for another rank."""
        if self.other_rank is None:
            return False
        steps = zip(*(entries_of(one, ParityStep) for one in (self.other_rank, self.single)), strict=False)
        for other, alone in steps:
            if not math.isfinite(math.hypot(*other.norms)):
                return False
            if not all(math.isclose(a, b, rel_tol=SMALL) for a, b in zip(other.norms, alone.norms, strict=False)):
                return True
        return False

    @cached_property
    def padding(self) -> float:
        """The share of samples that evaluations take once more on ranks, so that all have as many."""
        rows = Counter[str]()
        for one in (one for rank in self.ranks for one in entries_of(rank, PassTaken) if not one.trains):
            rows[one.loader] += one.rows
        alone = [one for one in entries_of(self.single, PassTaken) if 0 < one.rows < rows[one.loader] < 2 * one.rows]
        return max((rows[one.loader] / one.rows - 1 for one in alone), default=0.0)

    @property
    def has_same_samples(self) -> bool:
        """Return if all steps that both runs have made are compared."""
        return len(self.steps()) >= min(len(entries_of(one, ParityStep)) for one in (self.ranks[0], self.single))

    def gradients_of(self, ranks: Sequence[WatchedRank], steps: Sequence[ParityStep]) -> _Gradients:
        """Return the gradients in the same step of some ranks; of parts that these have, those of the whole."""
        found: dict[str, float] = {}
        count = sum(not norm < 0 for norm in steps[0].norms)
        for rank, step in zip(ranks, steps, strict=True):
            names = self._names.get((rank.started.rank, rank.started.world_size, step.optimizer), ())
            for name, norm in zip(names, step.norms, strict=False):
                if not norm < 0:  # NaN, too
                    found[name] = math.hypot(found.get(name, 0.0), norm) if step.sharded else found.get(name, norm)
        return _Gradients(found, steps[0].gradient if len(found) == count else ())  # else ranks step parts of the model

    def factor_of(self, of_ranks: Sequence[ParityStep], alone: ParityStep) -> str:
        """Return the factor of the world size by which all gradients of a step differ, in words; empty if none does."""
        many, one = self.gradients_of(self.ranks, of_ranks), self.gradients_of([self.single], [alone])
        for factor, words in ((self.world_size, str(self.world_size)), (1 / self.world_size, f"1/{self.world_size}")):
            scaled = _Gradients(
                {name: factor * norm for name, norm in one.norms.items()}, [factor * x for x in one.sketch]
            )
            if _distance(many, scaled) <= _NEAR:
                return words
        return ""

    def names_of(self, rank: WatchedRank, optimizer: int) -> tuple[str, ...]:
        """Return the names of an optimizer's parameters."""
        return self._names.get((rank.started.rank, rank.started.world_size, optimizer), ())

    @cached_property
    def _names(self) -> dict[tuple[int, int, int], tuple[str, ...]]:
        """The names of an optimizer's parameters; those of rank 0, if it has parameters of the same sizes."""
        every = [*self.ranks, self.single, *filter(None, [self.noise])]
        steps = [(rank.started, step) for rank in every for step in entries_of(rank, ParityStep) if step.names]
        first = {(step.optimizer, step.elements): step.names for _, step in reversed(steps)}
        return {
            (started.rank, started.world_size, step.optimizer): first[step.optimizer, step.elements]
            for started, step in steps
        }

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks[0].started.world_size


def parameters(comparison: Comparison) -> list[Quantity]:
    """Return the parameters before each step, and each next one, as far as each rank has them whole."""
    found, largest = [], 0.0
    # Noise is not measured for less; samples that differ may be computed with parameters that do.
    least = 0.0 if comparison.noise is not None else EQUAL if comparison.has_same_samples else FLOOR
    for of_ranks, alone, noise in [*comparison.steps(), *comparison.next_steps()]:
        if alone.sharded or len(of_ranks[0].values) != len(alone.values):
            return []
        many, one = of_ranks[0].values, alone.values
        size = math.hypot(*one) or 1.0
        largest = max(largest, math.dist(one, noise.values) / size if noise is not None else 0.0)
        apart = math.dist(many, one) / size
        found.append(Quantity(math.hypot(*many), size, apart if apart > least else 0.0, largest))
    return found


def gradients(comparison: Comparison) -> list[Quantity]:
    """Return the gradients of each step that both runs have made: their norms, and how far they are apart."""
    found, largest = [], 0.0
    for of_ranks, alone, noise in comparison.steps():
        many, one = (
            comparison.gradients_of(comparison.ranks, of_ranks),
            comparison.gradients_of([comparison.single], [alone]),
        )
        if noise is not None and comparison.noise is not None:
            largest = max(largest, _distance(one, comparison.gradients_of([comparison.noise], [noise])))
        found.append(Quantity(many.norm, one.norm, _distance(many, one), largest))
    return found


@dataclass(frozen=True, slots=True)
class _Gradients:
    norms: Mapping[str, float]  # by name of the parameter
    sketch: Sequence[float] = ()  # of all of them; empty if it is of parts

    @property
    def norm(self) -> float:
        return math.hypot(*self.norms.values())


def _distance(some: _Gradients, others: _Gradients) -> float:
    """Return how far gradients are apart, relative to the larger ones."""
    scale = max(some.norm, others.norm)
    if not math.isfinite(scale):
        return 0.0 if math.isfinite(some.norm) == math.isfinite(others.norm) else math.inf
    names = {*some.norms, *others.norms}
    apart = math.hypot(*(some.norms.get(name, 0.0) - others.norms.get(name, 0.0) for name in names))
    if [*some.norms] == [*others.norms] and len(some.sketch) == len(others.sketch):
        apart = max(apart, math.dist(some.sketch, others.sketch))
    return apart / scale if scale else 0.0


# What is shown


@dataclass(frozen=True, slots=True)
class Shown:
    """A number that both runs have shown at one place."""

    entry: NumbersShown  # of rank 0
    place: int  # of the number in the text
    quantity: Quantity
    is_local: bool = False  # whether it is made of the losses of rank 0 alone, or other ranks show their own

    @property
    def source(self) -> tuple[str, str, int]:
        """The line, the words and the place in them, which are the same in each epoch."""
        return str(self.entry.location), self.entry.text, self.place


def shown_numbers(comparison: Comparison) -> list[Shown]:
    """Return the numbers that both runs have shown, in order."""
    mine, theirs = _by_place(comparison.ranks[0]), _by_place(comparison.single)
    noise = _by_place(comparison.noise) if comparison.noise is not None else {}
    others = [_by_place(rank) for rank in comparison.ranks[1:]]
    losses = [(s.count, loss) for s in entries_of(comparison.ranks[0], ParityStep) for loss in s.losses]
    both = comparison.ranks[0], comparison.single
    rates = [[rate for step in entries_of(one, ParityStep) for rate in step.rates] for one in both]
    found, before = [], dict[_Key, int]()
    for key, entry in mine.items():
        since, before[(*key[:2], 0)] = before.get((*key[:2], 0), 0), entry.steps
        other = theirs.get(key)
        if other is None or len(other.numbers) != len(entry.numbers):
            continue
        third = noise.get(key)
        window = [loss for step, loss in losses if since <= step < entry.steps]
        for place, (text, alone) in enumerate(zip(entry.numbers, other.numbers, strict=True)):
            if place in entry.rates or _is_rate((text, alone), rates):
                continue
            again = third.numbers[place] if third is not None and len(third.numbers) > place else alone
            rows = [of_rank[key].numbers[place] for of_rank in others if key in of_rank]
            local = any(row != text for row in rows) or _is_of_losses(text, window) or place in entry.known
            padding = comparison.padding if entry.evaluates else 0.0
            found.append(Shown(entry, place, _quantity(text, alone, again, padding), local))
    return found


def _by_place(rank: WatchedRank) -> dict[_Key, NumbersShown]:
    """Return texts by line, words, and how many there were of them before."""
    found: dict[_Key, NumbersShown] = {}
    for entry in entries_of(rank, NumbersShown):
        number = 0
        while (key := (str(entry.location), f"{entry.how} {entry.text}", number)) in found:
            number += 1
        found[key] = entry
    return found


def _quantity(text: str, alone: str, again: str, padding: float) -> Quantity:
    one, other, third = float(text), float(alone), float(again)
    scale = max(abs(one), abs(other)) or 1.0
    digit = 1.5 * max(map(_last_digit, (text, alone)))
    apart = max(0.0, abs(one - other) - digit) / scale
    largest = max(abs(other), abs(third))
    changed = abs(other - third) / (largest if largest > FLOOR * scale else scale)
    return Quantity(one, other, apart, changed, padding)


def _last_digit(text: str) -> float:
    """Return what the last digit of a number stands for; of one that is shown in full, nothing."""
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    return 0.0 if not places else 10.0 ** (int(exponent or 0) - places)


def _is_rate(texts: Sequence[str], rates: Sequence[Sequence[float]]) -> bool:
    """Return if numbers are learning rates, or means of them, which are scaled."""
    pairs = [(float(text), _last_digit(text), known) for text, known in zip(texts, rates, strict=True) if known]
    ends = {max(known) for _, _, known in pairs}
    return len(ends) > 1 and all(min(known) - digit <= one <= max(known) + digit for one, digit, known in pairs)


def _is_of_losses(text: str, losses: Sequence[float]) -> bool:
    """Return if a number is the last of some losses, or their mean or sum, as far as it has digits."""
    value, digit = float(text), _last_digit(text)
    losses = [loss for loss in losses if abs(loss) < _LARGEST]
    if not losses or not digit or abs(value) < _FEWEST_DIGITS * digit:
        return False
    total = math.fsum(losses)
    made = (losses[-1], total / len(losses), total)
    return any(abs(value - one) <= digit for one in made)


# What an evaluation computes


def first_unequal(comparison: Comparison, steps: range, difference: float = _NEAR) -> tuple[Location, str] | None:
    """Return the line that first computes a number of an evaluation that is not one of a single process, with its name.

    A number of a single process is, on the ranks, the same on each, or their sum, their mean or an extreme of them.

    Args:
        comparison: The runs.
        steps: After which an evaluation is looked at.
        difference: Of what comes of the number, relative.
    """
    *of_ranks, alone = (_last_values(rank, steps) for rank in (*comparison.ranks, comparison.single))
    noise = _last_values(comparison.noise, steps) if comparison.noise else alone
    for key, value in of_ranks[0].items():
        others = [other for of_rank in of_ranks if (other := of_rank.get(key)) is not None]
        single = alone.get(key, ())
        if {*map(len, (noise.get(key, ()), *others))} != {len(single)} or not single:
            continue
        if single == (1.0,) and {*others} == {(comparison.world_size,)}:
            continue
        scale = max(map(abs, single)) or 1.0
        changed = max(abs(a - b) for a, b in zip(noise[key], single, strict=True)) / scale
        allowed = max(min(_NEAR, difference / MULTIPLE), MULTIPLE * changed) * scale
        if changed > SMALL or any(math.dist(made, single) <= allowed for made in _made_of(others)):
            continue  # a time, or random; or equal
        copies = (other for other, same in of_ranks[0].items() if same == value and value[0] % 1)
        path, line, _, name = next(copies, key)[1:]
        return Location(path, line), name
    return None


def line_of_number(rank: WatchedRank, steps: range, text: str) -> tuple[Location, str] | None:
    """Return the line of an evaluation that first computes a number that is shown, with its name."""
    digit = _last_digit(text)
    for (_, path, line, _, name), value in _last_values(rank, steps).items():
        if len(value) == 1 and abs(value[0] - float(text)) <= digit < abs(value[0]) / _FEWEST_DIGITS:
            return Location(path, line), name
    return None


def _last_values(rank: WatchedRank, steps: range) -> dict[_Line, tuple[float, ...]]:
    """Return what each line has made of each variable at last in an evaluation, in order.

    Not what it has made before: lines in a loop change a variable more often on some ranks than on others.
    """
    found: dict[_Line, tuple[float, ...]] = {}
    for traced in entries_of(rank, EvaluationTraced):
        for value in traced.values if traced.steps in steps else ():
            key = traced.steps, value.path, value.line, value.function, value.name
            found.pop(key, None)
            found[key] = value.numbers
    return found


def _made_of(numbers: Sequence[tuple[float, ...]]) -> Iterator[list[float]]:
    """Return what ranks may make of their numbers: the largest, the smallest, and unless they have it, sums and means.

    Numbers that all ranks have alike are of all samples already, but for counts.
    """
    for extreme in (max, min):
        yield [extreme(column) for column in zip(*numbers, strict=True)]
    if len(set(numbers)) == 1 and any(number % 1 for number in numbers[0]):
        return
    sums = [math.fsum(column) for column in zip(*numbers, strict=True)]
    yield sums
    yield [total / len(numbers) for total in sums]


# What is saved


def saved_states(rank: WatchedRank) -> dict[tuple[str, int], TensorsSaved]:
    """Return what a rank has saved, by line and by how often that had saved before."""
    found: dict[tuple[str, int], TensorsSaved] = {}
    for entry in entries_of(rank, TensorsSaved):
        number = sum(where == str(entry.location) for where, _ in found)
        found[str(entry.location), number] = entry
    return found


def values_that_differ(mine: TensorsSaved, single: TensorsSaved, again: TensorsSaved | None) -> list[str]:
    """Return the names of saved tensors whose norms differ from a single process's by more than noise.

    Noise is the largest change in one of several norms: by chance, it leaves one as it is.
    """
    largest = dict[str, float]()  # by the last part of the name, as "exp_avg"
    for name, norms in single.norms.items():
        kind = name.rpartition(".")[2]
        largest[kind] = max(largest.get(kind, 0.0), norms[0])
    found = []
    for name in mine.norms.keys() & single.norms.keys():
        (a, *_), other = mine.norms[name], single.norms[name]
        third = again.norms.get(name, other) if again is not None else other
        scale, rounding = max(abs(a), abs(other[0])) or 1.0, FLOOR * largest[name.rpartition(".")[2]]
        noise = max((abs(x - y) / (max(x, y) or 1.0) for x, y in zip(other, third, strict=True)), default=0.0)
        if Quantity(a, other[0], (abs(a - other[0]) - rounding) / scale, noise).differs:
            found.append(name)
    return sorted(found)
