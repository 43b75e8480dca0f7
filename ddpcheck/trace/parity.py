"""Quantities of a run on ranks and of a single process, side by side."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpcheck.findings.evidence.parity import NotReplayed, ParityPass, ParityStep, TensorsSaved
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.factors import name_world_factor
from ddpcheck.trace.script_facts import entries_of

EQUAL = 1e-4  # relative; smaller differences need no noise run
MULTIPLE = 4.0  # times the measured noise; smaller differences are undecided
FLOOR = 1e-5  # relative; rounding that one reordering of samples may not show
NEAR = 1e-3  # relative; evaluation numbers may be rounded
SMALL = 1e-2  # relative noise up to which a comparison is conclusive
_USELESS_NOISE = 0.5  # relative noise above which a quantity is useless
_ROW_TOLERANCE = 1e-5  # tolerance of a feature sum, per row
_Step = tuple[list[ParityStep], ParityStep, ParityStep | None]  # ranks, single process, noise run


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, such as a gradient norm, on ranks and in a single process."""

    ranks: float
    single: float
    difference: float  # relative
    noise: float  # relative, measured by the noise run
    padding: float = 0.0  # relative; share of samples that evaluation repeats on ranks

    @property
    def differs(self) -> bool:
        """Check if the difference exceeds the noise."""
        return not self.difference <= max(FLOOR, MULTIPLE * self.noise, self.padding) and self.noise < _USELESS_NOISE

    @property
    def is_equal(self) -> bool:
        """Check if the difference is within the noise, and the noise is small."""
        noise = MULTIPLE * self.noise if self.noise <= SMALL else 0.0
        return not self.differs and self.difference <= max(EQUAL, noise)

    @property
    def is_padded(self) -> bool:
        """Check if evaluation samples repeated as padding may explain the whole difference."""
        return not self.differs and self.difference > max(EQUAL, MULTIPLE * self.noise)

    @property
    def ratio(self) -> float:
        """Ratio `ranks / single`; NaN if `single` is 0."""
        return self.ranks / self.single if self.single else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs of one script, and optionally a third run that measures noise."""

    ranks: Sequence[RankTrace]
    single: RankTrace
    noise: RankTrace | None = None
    other_rank: RankTrace | None = None  # single process with another rank number

    @cached_property
    def steps(self) -> list[_Step]:
        """Return the steps that both runs made on the same samples, in order."""
        if self.has_other_model or self.computes_with_rank:
            return []
        return [*itertools.takewhile(lambda step: self._have_same_samples(*step[:2]), self._common_steps)]

    @cached_property
    def next_steps(self) -> list[_Step]:
        """Return each optimizer's first step after `steps`; before it, parameters should still be equal."""
        following = {(single.optimizer, single.count + 1) for _, single, _ in self.steps}
        return [s for s in self._common_steps[len(self.steps) :] if (s[1].optimizer, s[1].count) in following]

    @cached_property
    def _common_steps(self) -> list[_Step]:
        by_rank = [{(s.optimizer, s.count): s for s in entries_of(rank, ParityStep)} for rank in self.ranks]
        noise = {(s.optimizer, s.count): s for s in entries_of(self.noise, ParityStep)} if self.noise else {}
        keys = [((single.optimizer, single.count), single) for single in entries_of(self.single, ParityStep)]
        return [
            ([steps[key] for steps in by_rank], single, noise.get(key))
            for key, single in keys
            if all(key in steps for steps in by_rank)
        ]

    def _have_same_samples(self, rank_steps: Sequence[ParityStep], single: ParityStep) -> bool:
        sums = [math.fsum(column) for column in zip(*(step.samples for step in rank_steps), strict=True)]
        rows = max(sums[-1], single.samples[-1])
        if not min(sums[-1], single.samples[-1]):  # samples are not recorded, as without wrappers
            return not entries_of(self.single, NotReplayed)  # True if all inputs of the script were replayed
        return all(abs(a - b) <= _ROW_TOLERANCE * rows for a, b in zip(sums, single.samples, strict=True))

    @cached_property
    def has_other_model(self) -> bool:
        """Check if the initial parameters differ between the single process and rank 0."""
        first_steps = [next(iter(entries_of(rank, ParityStep)), None) for rank in (*self.ranks, self.single)]
        *rank_steps, single = first_steps
        if single is None or rank_steps[0] is None or single.sharded:
            return False
        if single.elements != rank_steps[0].elements:
            return True
        pairs = zip(rank_steps[0].values, single.values, strict=True)
        return not all(math.isclose(a, b, rel_tol=FLOOR, abs_tol=FLOOR) for a, b in pairs)

    @cached_property
    def computes_with_rank(self) -> bool:
        """Check if a single process gets other gradients when its rank number is changed."""
        if self.other_rank is None:
            return False
        steps = zip(*(entries_of(rank, ParityStep) for rank in (self.other_rank, self.single)), strict=False)
        for other_step, single in steps:
            if not math.isfinite(math.hypot(*other_step.norms)):
                return False
            if not all(math.isclose(a, b, rel_tol=SMALL) for a, b in zip(other_step.norms, single.norms, strict=False)):
                return True
        return False

    @cached_property
    def padding(self) -> float:
        """Share of evaluation samples that ranks repeat to get equal shard sizes."""
        rows = Counter[str]()
        for entry in (entry for rank in self.ranks for entry in entries_of(rank, ParityPass) if not entry.trains):
            rows[entry.loader] += entry.rows
        padded = [p for p in entries_of(self.single, ParityPass) if 0 < p.rows < rows[p.loader] < 2 * p.rows]
        return max((rows[p.loader] / p.rows - 1 for p in padded), default=0.0)

    @property
    def has_same_samples(self) -> bool:
        """Check if both runs got the same samples in all steps that both made."""
        return len(self.steps) >= min(len(entries_of(rank, ParityStep)) for rank in (self.ranks[0], self.single))

    @cached_property
    def parameters(self) -> list[Quantity]:
        """Comparisons of parameters before each of `steps` and `next_steps`; empty if sharded."""
        quantities, largest = [], 0.0
        # Without a noise run, less is noise; different samples may result from different parameters.
        threshold = 0.0 if self.noise is not None else EQUAL if self.has_same_samples else FLOOR
        for rank_steps, single, noise in [*self.steps, *self.next_steps]:
            if single.sharded or len(rank_steps[0].values) != len(single.values):
                return []
            actual, expected = rank_steps[0].values, single.values
            size = math.hypot(*expected) or 1.0
            largest = max(largest, math.dist(expected, noise.values) / size if noise is not None else 0.0)
            difference = math.dist(actual, expected) / size
            difference = difference if difference > threshold else 0.0
            quantities.append(Quantity(math.hypot(*actual), size, difference, largest))
        return quantities

    @cached_property
    def gradients(self) -> list[Quantity]:
        """Comparisons of the gradients in each of `steps`."""
        quantities, largest = [], 0.0
        for rank_steps, single, noise in self.steps:
            actual, expected = self._gradients_of(self.ranks, rank_steps), self._gradients_of([self.single], [single])
            if noise is not None and self.noise is not None:
                largest = max(largest, _relative_distance(expected, self._gradients_of([self.noise], [noise])))
            quantities.append(Quantity(actual.norm, expected.norm, _relative_distance(actual, expected), largest))
        return quantities

    def _gradients_of(self, ranks: Sequence[RankTrace], steps: Sequence[ParityStep]) -> _Gradients:
        norms: dict[str, float] = {}
        count = sum(not norm < 0 for norm in steps[0].norms)
        for rank, step in zip(ranks, steps, strict=True):
            for name, norm in zip(self.names_of(rank, step.optimizer), step.norms, strict=False):
                if not norm < 0:  # or NaN
                    norms[name] = math.hypot(norms.get(name, 0.0), norm) if step.sharded else norms.get(name, norm)
        return _Gradients(norms, steps[0].gradient if len(norms) == count else ())  # else ranks hold parts of the model

    def factor_of(self, rank_steps: Sequence[ParityStep], single: ParityStep) -> str:
        """Return the factor between the runs' gradients: "N" (world size), "1/N" or ''."""
        actual, expected = self._gradients_of(self.ranks, rank_steps), self._gradients_of([self.single], [single])

        def fits(factor: float) -> bool:
            norms = {name: factor * norm for name, norm in expected.norms.items()}
            return _relative_distance(actual, _Gradients(norms, [factor * x for x in expected.sketch])) <= NEAR

        return name_world_factor(self.world_size, fits)

    def names_of(self, rank: RankTrace, optimizer: int) -> tuple[str, ...]:
        """Return the names of an optimizer's parameters."""
        return self._names_by_optimizer.get((rank.started.rank, rank.started.world_size, optimizer), ())

    @cached_property
    def _names_by_optimizer(self) -> dict[tuple[int, int, int], tuple[str, ...]]:
        """Parameter names by (rank, world size, optimizer); rank 0's names, unless optimizer sizes differ."""
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


@dataclass(frozen=True, slots=True)
class _Gradients:
    norms: Mapping[str, float]  # by parameter name
    sketch: Sequence[float] = ()  # of all gradients; empty if partial

    @property
    def norm(self) -> float:
        return math.hypot(*self.norms.values())


def _relative_distance(actual: _Gradients, expected: _Gradients) -> float:
    scale = max(actual.norm, expected.norm)
    if not math.isfinite(scale):
        return 0.0 if math.isfinite(actual.norm) == math.isfinite(expected.norm) else math.inf
    names = {*actual.norms, *expected.norms}
    difference = math.hypot(*(actual.norms.get(name, 0.0) - expected.norms.get(name, 0.0) for name in names))
    if [*actual.norms] == [*expected.norms] and len(actual.sketch) == len(expected.sketch):
        difference = max(difference, math.dist(actual.sketch, expected.sketch))
    return difference / scale if scale else 0.0


def saved_states(rank: RankTrace) -> dict[tuple[str, int], TensorsSaved]:
    """Return a rank's saved tensors, by (line, number of earlier saves at this line)."""
    states: dict[tuple[str, int], TensorsSaved] = {}
    for entry in entries_of(rank, TensorsSaved):
        count = sum(line == str(entry.location) for line, _ in states)
        states[str(entry.location), count] = entry
    return states


def values_that_differ(saved: TensorsSaved, single: TensorsSaved, rerun: TensorsSaved | None) -> list[str]:
    """Return names of saved tensors whose norms differ beyond noise.

    Noise is the largest change of a tensor's norms from `single` to `rerun`. A single norm may be equal by chance.
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
