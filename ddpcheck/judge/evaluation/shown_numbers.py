"""Match numbers shown after an evaluation with metrics of all ranks' samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import eq

from ddpcheck.findings.evidence.evaluation import MetricShown, ShownNumber
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import counted, join_names
from ddpcheck.judge.evaluation.evaluation_results import Evaluated, gathered_labels, shows
from ddpcheck.judge.evaluation.rank_metrics import Evaluation

_FEWEST_BITS = 2.0  # low, since a metric of all samples is right in any case
_MOST_NAMED = 3


def trace_numbers(evaluations: Sequence[Evaluation], shown: Sequence[Sequence[MetricShown]]) -> tuple[str, str]:
    """Describe the shown numbers that match all ranks, and the rest; `shown` by rank."""
    loops = f"after {counted(len(evaluations), 'loop')} without backward"
    traced, others = 0, dict[Location | None, str]()
    for rank, of_rank in enumerate(shown):
        for one in of_rank:
            for number in one.numbers:
                if _is_traced(evaluations, len(shown), rank, one, number):
                    traced += 1
                else:
                    value = number.text or f"{number.values[0]:.6g}"
                    others.setdefault(one.location, f"{value} ({one.location})" if one.location else value)
    known = f"{counted(traced, 'number')} shown {loops}: metrics of the samples of all ranks" if traced else ""
    if others:
        return known, f"not compared with all ranks: {join_names([*others.values()], most=_MOST_NAMED)}"
    return known, "" if traced else f"not compared: no number was seen that the script shows {loops}"


def _is_traced(
    evaluations: Sequence[Evaluation], world_size: int, rank: int, shown: MetricShown, number: ShownNumber
) -> bool:
    """Return True if a number is a metric of all samples."""
    for one in evaluations:
        if rank not in one.by_rank or one.by_rank[rank].held.round != shown.round:
            continue
        of_ranks = [*one.by_rank.values()]
        if len(of_ranks) < world_size and any(not of_rank.samples >= of_rank.loader.size > 0 for of_rank in of_ranks):
            continue
        if any(metric.evidence(number) >= _FEWEST_BITS for metric in one.metrics):
            return True
        if any(shows(number, value) for value in _of_gathered(of_ranks)):
            return True
    return False


def _of_gathered(of_ranks: Sequence[Evaluated]) -> Iterator[float]:
    """Yield fractions of equal gathered rows, and means of gathered numbers."""
    gathered = gathered_labels(of_ranks)
    for one, other in itertools.combinations(gathered, 2):
        equal = [*map(eq, itertools.chain(*one.rows), itertools.chain(*other.rows))]
        yield sum(equal) / max(1, len(equal))
    for one in gathered:
        values = [*itertools.chain(*itertools.chain(*one.values))]
        yield sum(values) / max(1, len(values))
