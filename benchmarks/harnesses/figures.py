"""From sessions to figures: what a first test costs, what a further one costs, and how near the aims are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.harnesses.sessions import Memory
from ddpcheck.findings.replace import replace


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds."""

    wall: float
    cpu: float


@dataclass(slots=True)
class Measured:
    """What is known of one row in one world size.

    Attributes:
        row: Its key.
        world_size: Ranks, 0 where there are none.
        tests: Of the longer sessions; 1 where there is none.
        first: A session of one test in each repetition.
        longer: A session of `tests` tests in each repetition, measured right after it.
        memory: Of a session of its own.
        problem: Why there is nothing, or no more.
        failed: Whether that is a failure.
    """

    row: str
    world_size: int
    tests: int
    first: list[Cost] = field(default_factory=list)
    longer: list[Cost] = field(default_factory=list)
    memory: Memory | None = None
    problem: str = ""
    failed: bool = False

    @property
    def cold(self) -> Cost | None:
        """Median over the repetitions of a session with one test."""
        return _median(self.first)

    @property
    def further(self) -> Cost | None:
        """Median over the repetitions of (T(N) - T(1)) / (N - 1)."""
        count = self.tests - 1
        pairs = zip(self.first, self.longer, strict=False)  # the last may have failed
        return _median([Cost((b.wall - a.wall) / count, (b.cpu - a.cpu) / count) for a, b in pairs])

    def turn(self, number: int) -> Measured:
        """What is known from one repetition alone."""
        return replace(self, first=self.first[number:][:1], longer=self.longer[number:][:1])


Measurements = Mapping[tuple[str, int], Measured]


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that ddpcheck is to reach.

    Attributes:
        text: What is measured.
        limit: To be reached.
        unit: Of both.
        value: As measured; None where something that it needs is not there, or is lost in noise.
        at_least: Whether more is better.
        range: Lowest and highest of the repetitions, each by itself.
    """

    text: str
    limit: float
    unit: str
    value: float | None
    at_least: bool = False
    range: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "not met"


def ratio(one: float | None, other: float | None) -> float | None:
    """How many times `other` is `one`; None where that says nothing, as of a difference that noise made negative."""
    return None if one is None or other is None or one <= 0 or other <= 0 else one / other


def aims(measurements: Measurements) -> list[Aim]:
    """The aims, beside what has been measured."""
    count = max((len(each.first) for each in measurements.values()), default=0)
    turns = [_aims({key: each.turn(number) for key, each in measurements.items()}) for number in range(count)]
    found = []
    for number, aim in enumerate(_aims(measurements)):
        values = [turn[number].value for turn in turns]
        known = [value for value in values if value is not None]
        found.append(replace(aim, range=(min(known), max(known))) if known and aim.value is not None else aim)
    return found


def _aims(measurements: Measurements) -> list[Aim]:

    def cold(row: str, world_size: int) -> float | None:
        found = measurements.get((row, world_size))
        return found.cold.wall if found and found.cold else None

    def further(row: str, what: str) -> float | None:
        found = measurements.get((row, 2))
        return getattr(found.further, what) if found and found.further else None

    def memory(row: str, world_size: int, what: str) -> float | None:
        found = measurements.get((row, world_size))
        return getattr(found.memory, what) if found and found.memory else None

    wall, floor = further("fixture", "wall"), further("forked", "wall")
    return [
        Aim(
            "one more ddp_world test on 2 fresh ranks, wall time",
            30,
            "ms",
            wall * 1e3 if wall is not None and wall > 0 else None,
        ),
        Aim(
            "the same, CPU time: how many times less than torch.multiprocessing.spawn",
            100,
            "x",
            ratio(further("spawned", "cpu"), further("fixture", "cpu")),
            at_least=True,
        ),
        Aim(
            "first World of a program, compared with a bare `import torch` plus one floor",
            1.2,
            "x",
            ratio(cold("worlds", 2), _sum(cold("imported", 0), floor)),
        ),
        Aim(
            "first ddp_world test of a session, compared with the same session with an empty test plus one floor",
            1.2,
            "x",
            ratio(cold("fixture", 2), _sum(cold("empty", 0), floor)),
        ),
        Aim(
            "memory of a World of 4 ranks with its server, compared with one process that does a rank's work",
            1.5,
            "x",
            ratio(memory("worlds", 4, "below"), memory("alone", 1, "total")),
        ),
    ]


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _median(costs: list[Cost]) -> Cost | None:
    if not costs:
        return None
    return Cost(statistics.median(each.wall for each in costs), statistics.median(each.cpu for each in costs))
