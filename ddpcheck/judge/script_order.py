"""DDP803: results that were gathered rank by rank, and compared with labels or targets in the order of the dataset.

A pure function from `findings.evidence.evaluation` to findings. Nothing is said unless a number that the program shows
is just what a metric is of the wrong pairs, and not what it is of the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from ddpcheck.findings.evidence.evaluation import MetricShown
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import one_finding
from ddpcheck.judge.evaluation_results import (
    Evaluated,
    Gathered,
    are_other_data,
    first_shown,
    gathered_labels,
    is_shown,
    labels_given,
    places_of,
    targets_given,
)
from ddpcheck.judge.metrics_of_pairs import OF_NUMBERS, OF_SCORES, Metric, Row, accuracy

_APART = 1e-4  # relative: of metrics
_DIGITS = 4  # of a printed number, before one of many metrics is known by what is printed alone


def judge_order(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP803: a metric of results that were gathered rank by rank, against those of the dataset in its own order."""
    if min(one.samples for one in of_ranks) < 1 or are_other_data(of_ranks) or not any(one.shown for one in of_ranks):
        return []
    places = places_of(of_ranks)
    labels, numbers = _references(of_ranks, places)
    gathered = gathered_labels(of_ranks)
    for given in gathered:
        classes = [[(float(row),) for row in of_rank] for of_rank in given.rows]
        known = [
            (classes, labels, {"accuracy": accuracy}, 0),
            (given.values, labels, OF_SCORES, _DIGITS),
            (given.values, numbers, OF_NUMBERS, _DIGITS),
        ]
        for rows, references, metrics, digits in known:
            if any(len(of_rank) != len(place) for of_rank, place in zip(rows, places, strict=False)) or not rows:
                continue
            for name, reference in references.items():
                own = all(reference.get(p) == r for p, r in zip(chain(*places), chain(*rows), strict=True))
                if own and len(gathered) > 1:
                    continue  # the labels themselves
                found = _compared(of_ranks, given, rows, places, reference, metrics, digits)
                if found is not None:
                    return _misplaced(of_ranks, given, name, *found)
    return []


def _references(
    of_ranks: Sequence[Evaluated], places: Sequence[Sequence[int]]
) -> tuple[dict[str, Mapping[int, Row]], dict[str, Mapping[int, Row]]]:
    """What the results may be compared with, by place in the dataset: labels, and floating-point numbers."""
    labels: dict[str, Mapping[int, Row]] = {}
    numbers: dict[str, Mapping[int, Row]] = {}
    for one in of_ranks:
        for name, held in one.held.references.items():
            labels[f"{name} of the dataset"] = {place: (float(label),) for place, label in enumerate(held)}
        for name, floats in one.held.numbers_of.items():
            width = len(floats) // max(1, one.loader.size)
            rows = (tuple(floats[n * width : (n + 1) * width]) for n in range(one.loader.size))
            numbers[f"{name} of the dataset"] = dict(enumerate(rows))
    by_loader = "those that the loader gives"
    labels[by_loader] = {place: (float(label),) for place, label in labels_given(of_ranks, places).items()}
    numbers[by_loader] = {place: (target,) for place, target in targets_given(of_ranks, places).items()}
    return labels, numbers


def _compared(
    of_ranks: Sequence[Evaluated],
    given: Gathered,
    rows: Sequence[Sequence[Row]],
    places: Sequence[Sequence[int]],
    reference: Mapping[int, Row],
    metrics: Mapping[str, Metric],
    digits: int,
) -> tuple[str, float, float, MetricShown] | None:
    """The metric that is shown and made of the wrong pairs: its name, it, what it would be, and where it is shown."""
    everywhere = list(zip(chain(*places), chain(*rows), strict=True))
    by_place = dict(everywhere)
    if not by_place or not by_place.keys() <= reference.keys():
        return None  # not known
    first = dict(reversed(everywhere))
    right = [[(row, reference[place]) for place, row in one] for one in (by_place.items(), first.items(), everywhere)]
    if len({len(row) for pair in right[2] for row in pair}) != 1:
        return None
    others = {name: [metric(pairs) for pairs in right] for name, metric in metrics.items()}
    if any(is_shown(of_ranks, value, digits) for values in others.values() for value in values):
        return None  # what is shown is right
    for order in given.orders:
        joined = [(places[rank][number], rows[rank][number]) for rank, number in order[: len(by_place)]]
        if any(place not in reference for place in range(len(joined))):
            continue
        if all(place == own for place, (own, _) in enumerate(joined)):
            continue  # as they should be
        wrong = [(row, reference[place]) for place, (_, row) in enumerate(joined)]
        for name, metric in metrics.items():
            value = metric(wrong)
            if math.isfinite(value) and abs(value - others[name][0]) > _APART * max(abs(value), abs(others[name][0])):
                if (seen := first_shown(of_ranks, value, *others[name], digits=digits)) is not None:
                    return name, value, others[name][0], seen
    return None


def _misplaced(
    of_ranks: Sequence[Evaluated],
    given: Gathered,
    reference: str,
    metric: str,
    wrong: float,
    right: float,
    seen: MetricShown,
) -> list[Finding]:
    one = of_ranks[0]
    begins = ", ".join(map(str, one.loader.indices[:4]))
    return one_finding(
        "DDP803",
        (one.loader.dataset,),
        f"The results are gathered rank by rank and compared with labels in the order of the dataset: the "
        f"{wrong:.6g} that is {seen.how} would be {right:.6g}, if each were compared with its own label.",
        location=given.location,
        evidence=[
            f"rank 0 has samples {begins} ..., by {one.loader.sampler}",
            f"the labels are {reference}; it is the {metric}",
            f"it is {seen.how} at {seen.location}",
        ],
    )
