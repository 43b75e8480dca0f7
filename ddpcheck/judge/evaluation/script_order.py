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
    world_size, found = len(reduced), []
    for first in reduced[0]:
        others = [one for of_rank in reduced for one in of_rank if one.location == first.location]
        if len(others) == world_size and all(one.left == first.left for one in others):
            if any(all(_is_added(one, number) for one in others) for number in range(len(first.left[0]))):
                found += _told(first, world_size)
    return found


def _is_added(one: SumsReduced, number: int) -> bool:
    """Return True if each call adds a similar amount to the previous sum."""
    added = [given[number] - left[number] for given, left in zip(one.given[1:], one.left, strict=False)]
    return min(one.left[0][number], *added) > 0 and max(added) <= _ALIKE * min(added)


def _told(one: SumsReduced, world_size: int) -> list[Finding]:
    sums = ", ".join(f"{left[0]:.6g}" for left in one.left)
    return one_finding(
        "DDP806",
        ("all_reduce",),
        "The result of all_reduce goes into the next all_reduce at the same line, which multiplies the sums of earlier "
        f"batches by {world_size} each time.",
        location=one.location,
        evidence=[f"the sums were {sums}", f"before the second all_reduce, this rank had {one.given[1][0]:.6g}"],
    )


def judge_targets(
    uses: Sequence[Sequence[GatheredTargets]], losses: Sequence[Sequence[LossDifferentiated]]
) -> list[Finding]:
    """DDP804: targets that index rows of another rank; arguments by rank, in order.

    Each rank has its own row offset among the classes, and the targets are equal on all ranks, or consecutive:
    on some ranks the targets index another rank's samples as positives. No fault if each rank puts its own rows first,
    or counts targets from the offset.
    """
    members = sorted({one.members for of_rank in uses for one in of_rank})
    for group in members:
        of_group = [[one for one in uses[rank] if one.members == group] for rank in group if rank < len(uses)]
        if len(of_group) < len(group):
            continue
        for of_ranks in zip(*of_group, strict=False):
            places = {(one.step, one.location, one.rows, one.classes) for one in of_ranks}
            alike = len({one.targets for one in of_ranks}) == 1 or all(
                # consecutive: an offset, maybe wrong
                max(one.targets) - min(one.targets) + 1 == len(one.targets) == one.rows
                for one in of_ranks
            )
            if len(places) > 1 or not alike or len({one.own for one in of_ranks}) < len(of_ranks):
                continue
            wrong = [
                rank
                for rank, one in zip(group, of_ranks, strict=True)
                if not any(one.own <= target < one.own + one.rows for target in one.targets)
            ]
            if wrong and len(wrong) < len(group):
                made = {one.step: one.made for one in losses[group[0]] if one.made is not None}
                return _finding(wrong, group, of_ranks, made.get(of_ranks[0].step))
    return []


def _finding(
    wrong: Sequence[int], group: Sequence[int], of_ranks: Sequence[GatheredTargets], line: Location | None
) -> list[Finding]:
    one = of_ranks[group.index(wrong[0])]
    first, last = min(one.targets), max(one.targets)
    return one_finding(
        "DDP804",
        ("cross_entropy",),
        f"Of the {one.classes} rows that all_gather returns, those of rank {wrong[0]} begin at {one.own}, but the "
        f"targets on {format_ranks(wrong)} are {first} to {last}: rows of another rank.",
        ranks=wrong,
        location=one.loss or line or one.location,
        evidence=[
            f"gathered at {one.location}" if (one.loss or line) and one.location else "",
            *(
                f"rank {rank}: its rows are {each.own} to {each.own + each.rows - 1}, its targets {first} to {last}"
                for rank, each in list(zip(group, of_ranks, strict=True))[:4]
            ),
        ],
    )


_APART = 1e-4  # relative difference of metrics
_DIGITS = 4  # printed digits needed to identify one of many metrics by its text


def judge_order(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP803: results gathered rank by rank, compared with labels in dataset order."""
    if min(one.samples for one in of_ranks) < 1 or not any(one.shown or one.compared for one in of_ranks):
        return []
    if are_other_data(of_ranks):
        return []
    places = places_of(of_ranks)
    labels, numbers = _references(of_ranks, places)
    gathered = gathered_labels(of_ranks)
    for given in gathered:
        classes = [[(float(row),) for row in of_rank] for of_rank in given.rows]
        kinds = [
            (classes, labels, {"accuracy": accuracy}, 0),
            (given.values, labels, OF_SCORES, _DIGITS),
            (given.values, numbers, OF_NUMBERS, _DIGITS),
        ]
        for rows, references, metrics, digits in kinds:
            if any(len(of_rank) != len(place) for of_rank, place in zip(rows, places, strict=False)) or not rows:
                continue
            for name, reference in references.items():
                own = all(reference.get(p) == r for p, r in zip(chain(*places), chain(*rows), strict=True))
                if own and len(gathered) > 1:
                    continue  # the gathered rows are the labels
                found = _compared(of_ranks, given, rows, places, reference, metrics, digits)
                if found is not None:
                    return _misplaced(of_ranks[0], given, name, *found)
    return []


def _references(
    of_ranks: Sequence[Evaluated], places: Sequence[Sequence[int]]
) -> tuple[dict[str, Mapping[int, Row]], dict[str, Mapping[int, Row]]]:
    """Return possible labels and float targets by name, each by dataset position."""
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
    labels[by_loader] = given_by_loader(of_ranks, places, "classes")
    numbers[by_loader] = given_by_loader(of_ranks, places, "targets")
    return labels, numbers


def _compared(
    of_ranks: Sequence[Evaluated],
    given: Gathered,
    rows: Sequence[Sequence[Row]],
    places: Sequence[Sequence[int]],
    reference: Mapping[int, Row],
    metrics: Mapping[str, Metric],
    digits: int,
) -> tuple[str, str] | None:
    """Return the shown metric or comparison of wrong pairs, in words, and evidence."""
    everywhere = list(zip(chain(*places), chain(*rows), strict=True))
    by_place = dict(everywhere)
    if not by_place or not by_place.keys() <= reference.keys():
        return None  # references are not known
    first = dict(reversed(everywhere))
    right = [[(row, reference[place]) for place, row in one] for one in (by_place.items(), first.items(), everywhere)]
    if len({len(row) for pair in right[2] for row in pair}) != 1:
        return None
    others = {name: [metric(pairs) for pairs in right] for name, metric in metrics.items()}
    if any(is_shown(of_ranks, value, digits) for values in others.values() for value in values):
        return None  # the shown value is right
    for order in given.orders:
        joined = [(places[rank][number], rows[rank][number]) for rank, number in order[: len(by_place)]]
        if any(place not in reference for place in range(len(joined))):
            continue
        if all(place == own for place, (own, _) in enumerate(joined)):
            continue  # in the right order
        wrong = [(row, reference[place]) for place, (_, row) in enumerate(joined)]
        for name, metric in metrics.items():
            value = metric(wrong)
            if math.isfinite(value) and abs(value - others[name][0]) > _APART * max(abs(value), abs(others[name][0])):
                if (seen := first_shown(of_ranks, value, *others[name], digits=digits)) is not None:
                    return (
                        f"the {value:.6g} that is {seen.how} would be {others[name][0]:.6g}, if each were compared "
                        "with its own label",
                        f"it is {seen.how} at {seen.location}: the {name}",
                    )
        is_other_order = [row for _, row in joined] != [row for _, row in sorted(by_place.items())]
        if is_other_order and (line := _met(of_ranks, wrong)) is not None:
            apart = sum(place != own for place, (own, _) in enumerate(joined))
            return (
                f"{apart} of {len(joined)} results are compared with the label of another sample",
                f"they are compared at {line}",
            )
    return None


def _met(of_ranks: Sequence[Evaluated], pairs: Sequence[tuple[Row, Row]]) -> Location | None:
    """Return the line at which the script compares the pairs, as is or scaled."""
    one, other = ([x for pair in pairs for x in pair[side]] for side in (0, 1))
    for met in chain.from_iterable(each.compared for each in of_ranks):
        for a, b in ((met.one, met.other), (met.other, met.one)):
            if is_scaled(a, one) and is_scaled(b, other):
                return met.location
    return None


def _misplaced(one: Evaluated, given: Gathered, reference: str, what: str, seen: str) -> list[Finding]:
    begins = ", ".join(map(str, one.loader.indices[:4]))
    return one_finding(
        "DDP803",
        (one.loader.dataset,),
        f"The results are gathered rank by rank and compared with labels in the order of the dataset: {what}.",
        location=given.location,
        evidence=[f"rank 0 has samples {begins} ..., by {one.loader.sampler}", f"the labels are {reference}", seen],
    )
