"""DDP803 order-of-gathered-results: warning, keeps_gradients

Results are gathered rank by rank, and compared with labels in the order of the dataset.

Why: DistributedSampler gives rank r the samples r, r + W, r + 2W and so on (W is the world size). all_gather returns
    all results of rank 0 first, then all results of rank 1. So results are compared with the labels of other samples,
    and the metric is no better than a guess.
Fix: Gather the labels or the indices with the results, or put the results back in order: torch.stack(gathered,
    1).flatten(0, 1)[:len(dataset)].
Detected: `ddpcheck run` keeps the results that ranks gather during or after an evaluation (a loop over a loader
    without backward). It also keeps the labels of the loader or the dataset. From results and labels in their given
    order, it computes accuracy, mean error, correlation and similar metrics. DDP803 is reported if a printed, logged
    or saved number is such a metric, and would be different if each sample were compared with its own label. DDP803
    is also reported if the script itself compares results and labels in this order. Numbers that the script rounds to
    fewer than three digits are not covered.
Ignore: Never: the metric is not that of the model.
Line: The call of the collective that gathers the results.
Checks: run evaluation
Example:
    dist.all_gather(parts, predictions)      # of a loader with a DistributedSampler
    accuracy = (torch.cat(parts) == dataset.labels).float().mean()  # right: gather the labels too
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import correlation
from typing import Literal

from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluation import (
    Gathered,
    RankEvaluation,
    data_differ,
    first_shown,
    gathered_labels,
    output_showing,
)
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import OF_NUMBERS, OF_SCORES, Evaluation, Metric, Row

ROUNDING = 1e-9
"""How far a correlation may be from 1 if one sequence is the other, scaled and shifted."""

LEAST_DIFFERENCE = 1e-4
"""Relative difference between the metrics of two orders, from which a shown number tells them apart."""

FEWEST_DIGITS = 4
"""Printed digits needed to identify one of many metrics by its text."""


@rule
def judge_order(evaluations: Evaluations) -> list[Finding]:
    """DDP803: results gathered rank by rank, compared with labels in dataset order."""
    return evaluations.first_findings(_judge_order)


def _judge_order(evaluation: Evaluation) -> list[Finding]:
    evals = evaluation.evals
    if min(ev.samples for ev in evals) < 1 or not any(ev.shown or ev.compared for ev in evals) or data_differ(evals):
        return []
    indices = _sample_positions(evals)
    labels, numbers = _find_references(evals, indices)
    gathered = gathered_labels(evals)
    for call in gathered:
        classes = [[(float(row),) for row in rank_rows] for rank_rows in call.rows]
        kinds = [
            (classes, labels, {"accuracy": lambda pairs: sum(a == b for a, b in pairs) / len(pairs)}, 0),
            (call.values, labels, OF_SCORES, FEWEST_DIGITS),
            (call.values, numbers, OF_NUMBERS, FEWEST_DIGITS),
        ]
        for rows, references, metrics, digits in kinds:
            if any(len(values) != len(positions) for values, positions in zip(rows, indices, strict=False)) or not rows:
                continue
            for name, reference in references.items():
                are_labels = all(reference.get(p) == r for p, r in zip(chain(*indices), chain(*rows), strict=True))
                if are_labels and len(gathered) > 1:
                    continue  # the gathered rows are the labels
                if mismatch := _find_wrong_pairs(evals, call, rows, indices, reference, metrics, digits):
                    message, seen = mismatch
                    loader, begins = evals[0].loader, ", ".join(map(str, evals[0].loader.indices[:4]))
                    return new_finding(
                        "DDP803",
                        (loader.dataset,),
                        "The results are gathered rank by rank and compared with labels in the order of the dataset: "
                        f"{message}.",
                        location=call.location,
                        evidence=[
                            f"rank 0 has samples {begins} ..., by {loader.sampler}",
                            f"the labels are {name}",
                            seen,
                        ],
                    )
    return []


def _sample_positions(evals: Sequence[RankEvaluation]) -> list[list[int]]:
    """Return each rank's sample positions: in the common `Subset`, else in the dataset."""
    subset = evals[0].subset
    is_common = all(list(ev.subset) == list(subset) for ev in evals)
    positions = {index: position for position, index in enumerate(subset)} if is_common else {}
    return [[positions.get(index, index) for index in ev.loader.indices] for ev in evals]


def _find_references(
    evals: Sequence[RankEvaluation], indices: Sequence[Sequence[int]]
) -> tuple[dict[str, Mapping[int, Row]], dict[str, Mapping[int, Row]]]:
    """Return possible labels and float targets by name, each by dataset position."""
    labels: dict[str, Mapping[int, Row]] = {}
    numbers: dict[str, Mapping[int, Row]] = {}
    for ev in evals:
        for name, values in ev.results.references.items():
            labels[f"{name} of the dataset"] = {index: (float(label),) for index, label in enumerate(values)}
        for name, floats in ev.results.numbers_of.items():
            width = len(floats) // max(1, ev.loader.size)
            rows = (tuple(floats[n * width : (n + 1) * width]) for n in range(ev.loader.size))
            numbers[f"{name} of the dataset"] = dict(enumerate(rows))
    by_loader = "those that the loader gives"
    labels[by_loader] = _loader_labels(evals, indices, "classes")
    numbers[by_loader] = _loader_labels(evals, indices, "targets")
    return labels, numbers


def _loader_labels(
    evals: Sequence[RankEvaluation], indices: Sequence[Sequence[int]], kind: Literal["classes", "targets"]
) -> dict[int, Row]:
    """Return the loader's label or target by dataset position, or {} if incomplete."""
    values = [getattr(ev.loader, kind) for ev in evals]
    if any(len(rank_values) != ev.samples for rank_values, ev in zip(values, evals, strict=True)):
        return {}
    return {index: (float(value),) for index, value in zip(chain(*indices), chain(*values), strict=True)}


def _find_wrong_pairs(
    evals: Sequence[RankEvaluation],
    call: Gathered,
    rows: Sequence[Sequence[Row]],
    indices: Sequence[Sequence[int]],
    reference: Mapping[int, Row],
    metrics: Mapping[str, Metric],
    digits: int,
) -> tuple[str, str] | None:
    """Return a message and evidence on results paired with wrong labels, or `None`."""
    all_rows = list(zip(chain(*indices), chain(*rows), strict=True))
    by_index = dict(all_rows)
    if not by_index or not by_index.keys() <= reference.keys():
        return None  # references are not known
    first = dict(reversed(all_rows))
    right = [[(row, reference[index]) for index, row in seq] for seq in (by_index.items(), first.items(), all_rows)]
    if len({len(row) for pair in right[2] for row in pair}) != 1:
        return None
    correct = {name: [metric(pairs) for pairs in right] for name, metric in metrics.items()}
    if any(output_showing(evals, value, digits) for values in correct.values() for value in values):
        return None  # the shown value is right
    for order in call.orders:
        joined = [(indices[rank][number], rows[rank][number]) for rank, number in order[: len(by_index)]]
        if any(index not in reference for index in range(len(joined))):
            continue
        if all(index == actual for index, (actual, _) in enumerate(joined)):
            continue  # in the right order
        wrong = [(row, reference[index]) for index, (_, row) in enumerate(joined)]
        for name, metric in metrics.items():
            value = metric(wrong)
            if math.isfinite(value) and abs(value - correct[name][0]) > LEAST_DIFFERENCE * max(
                abs(value), abs(correct[name][0])
            ):
                if (seen := first_shown(evals, value, *correct[name], digits=digits)) is not None:
                    return (
                        f"the {value:.6g} that is {seen.how} would be {correct[name][0]:.6g}, if each were compared "
                        "with its own label",
                        f"it is {seen.how} at {seen.location}: the {name}",
                    )
        is_other_order = [row for _, row in joined] != [row for _, row in sorted(by_index.items())]
        if is_other_order and (line := _comparison_line(evals, wrong)) is not None:
            moved = sum(index != actual for index, (actual, _) in enumerate(joined))
            return (
                f"{moved} of {len(joined)} results are compared with the label of another sample",
                f"they are compared at {line}",
            )
    return None


def _comparison_line(evals: Sequence[RankEvaluation], pairs: Sequence[tuple[Row, Row]]) -> Location | None:
    """Return the line at which the script compares the (perhaps rescaled) pairs, or None."""
    rows, labels = ([x for pair in pairs for x in pair[side]] for side in (0, 1))
    for comparison in chain.from_iterable(ev.compared for ev in evals):
        for a, b in ((comparison.first, comparison.second), (comparison.second, comparison.first)):
            if _is_scaled(a, rows) and _is_scaled(b, labels):
                return comparison.location
    return None


def _is_scaled(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if `numbers` are an affine function of `others`."""
    if len(numbers) != len(others) or len(set(others)) < 2:
        return False
    try:
        return abs(correlation(numbers, others)) > 1 - ROUNDING
    except (ArithmeticError, ValueError):
        return False
