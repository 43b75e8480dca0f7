"""DDP803, 804 and 806: gathered rows in wrong order, and sums reduced again.

DDP803 (results compared with labels in dataset order) requires that a shown number equals the metric of the wrong pairs
and not of the right pairs, or that the program compares the wrong pairs. DDP804 is on targets that index gathered rows
of another rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from ddpcheck.findings.evidence.evaluation import GatheredTargets, SumsReduced
from ddpcheck.findings.evidence.script import LossDifferentiated
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, one_finding
from ddpcheck.judge.evaluation.evaluation_results import (
    Evaluated,
    Gathered,
    are_other_data,
    first_shown,
    gathered_labels,
    given_by_loader,
    is_shown,
    places_of,
)
from ddpcheck.judge.evaluation.metrics import OF_NUMBERS, OF_SCORES, Metric, Row, accuracy, is_scaled

_ALIKE = 4.0  # largest ratio between the amounts of two batches


def judge_sums_again(reduced: Sequence[Sequence[SumsReduced]]) -> list[Finding]:
    """DDP806: all_reduce of an earlier all_reduce result; one finding per line, `reduced` by rank.

    Each rank adds about the same amount since the last sum, while the sums grow by the world size or more: numbers that
    merely grow do not do both.
    """
    world_size, findings = len(reduced), []
    for first in reduced[0]:
        at_line = [sums for rank_sums in reduced for sums in rank_sums if sums.location == first.location]
        if len(at_line) == world_size and all(sums.left == first.left for sums in at_line):
            if any(all(_is_added(sums, number) for sums in at_line) for number in range(len(first.left[0]))):
                findings += _told(first, world_size)
    return findings


def _is_added(sums: SumsReduced, number: int) -> bool:
    """Return True if each call adds a similar amount to the previous sum."""
    added = [inputs[number] - result[number] for inputs, result in zip(sums.given[1:], sums.left, strict=False)]
    return min(sums.left[0][number], *added) > 0 and max(added) <= _ALIKE * min(added)


def _told(sums: SumsReduced, world_size: int) -> list[Finding]:
    text = ", ".join(f"{result[0]:.6g}" for result in sums.left)
    return one_finding(
        "DDP806",
        ("all_reduce",),
        "The result of all_reduce goes into the next all_reduce at the same line, which multiplies the sums of earlier "
        f"batches by {world_size} each time.",
        location=sums.location,
        evidence=[f"the sums were {text}", f"before the second all_reduce, this rank had {sums.given[1][0]:.6g}"],
    )


def judge_targets(
    uses: Sequence[Sequence[GatheredTargets]], losses: Sequence[Sequence[LossDifferentiated]]
) -> list[Finding]:
    """DDP804: targets that index rows of another rank; arguments by rank, in order.

    Each rank has its own row offset among the classes, and the targets are equal on all ranks, or consecutive:
    on some ranks the targets index another rank's samples as positives. No fault if each rank puts its own rows first,
    or counts targets from the offset.
    """
    members = sorted({use.members for rank_uses in uses for use in rank_uses})
    for group in members:
        group_uses = [[use for use in uses[rank] if use.members == group] for rank in group if rank < len(uses)]
        if len(group_uses) < len(group):
            continue
        for step_uses in zip(*group_uses, strict=False):
            keys = {(use.step, use.location, use.rows, use.classes) for use in step_uses}
            comparable = len({use.targets for use in step_uses}) == 1 or all(
                # consecutive: an offset, maybe wrong
                max(use.targets) - min(use.targets) + 1 == len(use.targets) == use.rows
                for use in step_uses
            )
            if len(keys) > 1 or not comparable or len({use.own for use in step_uses}) < len(step_uses):
                continue
            wrong = [
                rank
                for rank, use in zip(group, step_uses, strict=True)
                if not any(use.own <= target < use.own + use.rows for target in use.targets)
            ]
            if wrong and len(wrong) < len(group):
                loss_lines = {loss.step: loss.made for loss in losses[group[0]] if loss.made is not None}
                return _finding(wrong, group, step_uses, loss_lines.get(step_uses[0].step))
    return []


def _finding(
    wrong: Sequence[int], group: Sequence[int], uses: Sequence[GatheredTargets], line: Location | None
) -> list[Finding]:
    use = uses[group.index(wrong[0])]
    first, last = min(use.targets), max(use.targets)
    return one_finding(
        "DDP804",
        ("cross_entropy",),
        f"Of the {use.classes} rows that all_gather returns, those of rank {wrong[0]} begin at {use.own}, but the "
        f"targets on {format_ranks(wrong)} are {first} to {last}: rows of another rank.",
        ranks=wrong,
        location=use.loss or line or use.location,
        evidence=[
            f"gathered at {use.location}" if (use.loss or line) and use.location else "",
            *(
                f"rank {rank}: its rows are {u.own} to {u.own + u.rows - 1}, its targets {first} to {last}"
                for rank, u in list(zip(group, uses, strict=True))[:4]
            ),
        ],
    )


_APART = 1e-4  # relative difference of metrics
_DIGITS = 4  # printed digits needed to identify one of many metrics by its text


def judge_order(evals: Sequence[Evaluated]) -> list[Finding]:
    """DDP803: results gathered rank by rank, compared with labels in dataset order."""
    if min(ev.samples for ev in evals) < 1 or not any(ev.shown or ev.compared for ev in evals):
        return []
    if are_other_data(evals):
        return []
    indices = places_of(evals)
    labels, numbers = _references(evals, indices)
    gathered = gathered_labels(evals)
    for call in gathered:
        classes = [[(float(row),) for row in rank_rows] for rank_rows in call.rows]
        kinds = [
            (classes, labels, {"accuracy": accuracy}, 0),
            (call.values, labels, OF_SCORES, _DIGITS),
            (call.values, numbers, OF_NUMBERS, _DIGITS),
        ]
        for rows, references, metrics, digits in kinds:
            if any(len(values) != len(positions) for values, positions in zip(rows, indices, strict=False)) or not rows:
                continue
            for name, reference in references.items():
                are_labels = all(reference.get(p) == r for p, r in zip(chain(*indices), chain(*rows), strict=True))
                if are_labels and len(gathered) > 1:
                    continue  # the gathered rows are the labels
                mismatch = _compared(evals, call, rows, indices, reference, metrics, digits)
                if mismatch is not None:
                    return _misplaced(evals[0], call, name, *mismatch)
    return []


def _references(
    evals: Sequence[Evaluated], indices: Sequence[Sequence[int]]
) -> tuple[dict[str, Mapping[int, Row]], dict[str, Mapping[int, Row]]]:
    """Return possible labels and float targets by name, each by dataset position."""
    labels: dict[str, Mapping[int, Row]] = {}
    numbers: dict[str, Mapping[int, Row]] = {}
    for ev in evals:
        for name, values in ev.held.references.items():
            labels[f"{name} of the dataset"] = {index: (float(label),) for index, label in enumerate(values)}
        for name, floats in ev.held.numbers_of.items():
            width = len(floats) // max(1, ev.loader.size)
            rows = (tuple(floats[n * width : (n + 1) * width]) for n in range(ev.loader.size))
            numbers[f"{name} of the dataset"] = dict(enumerate(rows))
    by_loader = "those that the loader gives"
    labels[by_loader] = given_by_loader(evals, indices, "classes")
    numbers[by_loader] = given_by_loader(evals, indices, "targets")
    return labels, numbers


def _compared(
    evals: Sequence[Evaluated],
    call: Gathered,
    rows: Sequence[Sequence[Row]],
    indices: Sequence[Sequence[int]],
    reference: Mapping[int, Row],
    metrics: Mapping[str, Metric],
    digits: int,
) -> tuple[str, str] | None:
    """Return the shown metric or comparison of wrong pairs, in words, and evidence."""
    everywhere = list(zip(chain(*indices), chain(*rows), strict=True))
    by_index = dict(everywhere)
    if not by_index or not by_index.keys() <= reference.keys():
        return None  # references are not known
    first = dict(reversed(everywhere))
    right = [[(row, reference[index]) for index, row in seq] for seq in (by_index.items(), first.items(), everywhere)]
    if len({len(row) for pair in right[2] for row in pair}) != 1:
        return None
    correct = {name: [metric(pairs) for pairs in right] for name, metric in metrics.items()}
    if any(is_shown(evals, value, digits) for values in correct.values() for value in values):
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
            if math.isfinite(value) and abs(value - correct[name][0]) > _APART * max(abs(value), abs(correct[name][0])):
                if (seen := first_shown(evals, value, *correct[name], digits=digits)) is not None:
                    return (
                        f"the {value:.6g} that is {seen.how} would be {correct[name][0]:.6g}, if each were compared "
                        "with its own label",
                        f"it is {seen.how} at {seen.location}: the {name}",
                    )
        is_other_order = [row for _, row in joined] != [row for _, row in sorted(by_index.items())]
        if is_other_order and (line := _met(evals, wrong)) is not None:
            moved = sum(index != actual for index, (actual, _) in enumerate(joined))
            return (
                f"{moved} of {len(joined)} results are compared with the label of another sample",
                f"they are compared at {line}",
            )
    return None


def _met(evals: Sequence[Evaluated], pairs: Sequence[tuple[Row, Row]]) -> Location | None:
    """Return the line at which the script compares the pairs, as is or scaled."""
    rows, labels = ([x for pair in pairs for x in pair[side]] for side in (0, 1))
    for comparison in chain.from_iterable(ev.compared for ev in evals):
        for a, b in ((comparison.one, comparison.other), (comparison.other, comparison.one)):
            if is_scaled(a, rows) and is_scaled(b, labels):
                return comparison.location
    return None


def _misplaced(ev: Evaluated, call: Gathered, reference: str, message: str, seen: str) -> list[Finding]:
    begins = ", ".join(map(str, ev.loader.indices[:4]))
    return one_finding(
        "DDP803",
        (ev.loader.dataset,),
        f"The results are gathered rank by rank and compared with labels in the order of the dataset: {message}.",
        location=call.location,
        evidence=[f"rank 0 has samples {begins} ..., by {ev.loader.sampler}", f"the labels are {reference}", seen],
    )
