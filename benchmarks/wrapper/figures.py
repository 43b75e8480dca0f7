"""From the clocks of the ranks to figures: ratios turn by turn, their medians and how sure these are."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WALL, CPU = 0, 1
LIMIT = 1.0  # per cent of a step
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, with the interval that holds the true one in 95 of 100 runs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks have measured of a case.

    Attributes:
        case: Its key.
        ranks: What `measure` returned, by rank.
        problem: Why it was not measured, or stopped.
        failed: Whether that is an error.
    """

    case: str
    ranks: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    failed: bool = False

    @property
    def turns(self) -> int:
        """How often each alternative was timed."""
        return len(self.ranks[0]["samples"]["plain"])

    def seconds(self, name: str, clock: int) -> list[float]:
        """Of each turn: the wall time of the rank that took longest, or the mean processor time."""
        join = max if clock == WALL else statistics.fmean
        turns = zip(*(rank["samples"][name] for rank in self.ranks), strict=True)
        return [join(one[clock] for one in turn) for turn in turns]

    def step(self, clock: int) -> float:
        """Seconds of a step of plain DDP."""
        return statistics.median(self.seconds("plain", clock))

    def extra(self, name: str, clock: int) -> Estimate | None:
        """What a step takes longer than one of plain DDP in the same turn, in per cent; `None` if not measured."""
        if name not in self.ranks[0]["samples"]:
            return None
        pairs = zip(self.seconds(name, clock), self.seconds("plain", clock), strict=True)
        return estimate([100 * (theirs / plain - 1) for theirs, plain in pairs])

    def own(self, clock: int) -> float:
        """Seconds that a watched step spends in our own code: the mean over the ranks of the median over the steps."""
        return statistics.fmean(statistics.median(one[clock] for one in rank["own"]) for rank in self.ranks)

    def first(self, clock: int) -> float | None:
        """What the first rounds of a watch take longer than as many plain steps, in per cent: the median repetition.

        `None` where a step takes too long for that many.
        """
        found = []
        for repetition in zip(*(rank["first"] for rank in self.ranks), strict=True):
            spent = {
                name: sum(one[clock] for rank in repetition for one in rank[name]) for name in ("plain", "checked")
            }
            found.append(100 * (spent["checked"] / spent["plain"] - 1))
        return statistics.median(found) if found else None

    def verdict(self) -> str:
        """Whether the wall time of a step keeps to the limit, and to less than what `find_unused_parameters` takes."""
        extra, unused = self.extra("checked", WALL), self.extra("unused", WALL)
        if extra is None:
            return "not measured"
        if extra.low > LIMIT:
            return "not met"
        if unused is not None and extra.low > unused.high:
            return "not met"
        return "met" if extra.high <= LIMIT and (unused is None or extra.value < unused.value) else "cannot tell"


def estimate(values: Sequence[float]) -> Estimate:
    """The median and its interval by order statistics, which assumes nothing about how `values` are spread.

    Of `n` values, the k-th smallest and the k-th largest hold the median with the probability that a fair coin shows
    heads at least k and at most n - k times in n throws (https://en.wikipedia.org/wiki/Median#Confidence_intervals is
    the binomial argument). With fewer than 6 values this is below 95 % even for the smallest and the largest.
    """
    ordered = sorted(values)
    n, k, outside = len(ordered), 0, 0.0
    while k < n // 2:
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 1 - _CONFIDENCE:
            break
        k += 1
    k = max(k, 1)
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k])


@dataclass(frozen=True, slots=True)
class Record:
    """What a run has found, with versions and the number of cores."""

    surroundings: Mapping[str, str]
    measurements: Sequence[Measured]

    def save(self, path: Path) -> None:
        """Write all clocks as JSON."""
        content = {"surroundings": dict(self.surroundings), "measurements": [asdict(one) for one in self.measurements]}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Record:
        """Read what `save` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return Record(content["surroundings"], [Measured(**one) for one in content["measurements"]])
