"""Evaluation results of all ranks: inputs of collectives, gathered rows and shown metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Location
from ddpcheck.judge.evaluation.metrics import Row

_SAME = 2e-6  # relative tolerance, of float32
_FEWEST_DIGITS = 3  # printed digits needed to identify a number by its text


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Evaluation on one rank: loader pass, exchanged results, shown metrics of its round."""

    loader: LoaderPass
    held: EvaluationPass
    exchanged: Sequence[ResultExchanged]
    shown: Sequence[MetricShown]
    subset: Sequence[int] = ()
    compared: Sequence[RowsCompared] = ()

    @property
    def samples(self) -> int:
        return len(self.loader.indices)

    @property
    def batch(self) -> int:
        """Batch size, from the number of batches if a batch sampler has none."""
        return max(self.loader.batch_size, -(-self.samples // max(1, self.loader.batches)))


def places_of(of_ranks: Sequence[Evaluated]) -> list[list[int]]:
    """Return each rank's sample positions: in the common `Subset`, else in the dataset."""
    subset = of_ranks[0].subset
    common = all(list(one.subset) == list(subset) for one in of_ranks)
    places = {index: place for place, index in enumerate(subset)} if common else {}
    return [[places.get(index, index) for index in one.loader.indices] for one in of_ranks]


def given_by_loader(
    of_ranks: Sequence[Evaluated], places: Sequence[Sequence[int]], kind: Literal["classes", "targets"]
) -> dict[int, Row]:
    """Return the loader's label or target by dataset position, or {} if incomplete."""
    given = [getattr(one.loader, kind) for one in of_ranks]
    if any(len(values) != one.samples for values, one in zip(given, of_ranks, strict=True)):
        return {}
    pairs = zip(itertools.chain(*places), itertools.chain(*given), strict=True)
    return {place: (float(value),) for place, value in pairs}


def are_other_data(of_ranks: Sequence[Evaluated]) -> bool:
    """Return True if an index is a different sample on another rank."""
    first, *others = (one.loader for one in of_ranks)
    for other in others:
        if first.digest and other.digest and first.digest != other.digest:
            return True
        common = [
            rows[index] == other.contents[place][index]
            for place, rows in first.contents.items()
            for index in rows.keys() & other.contents.get(place, {}).keys()
        ]
        if common and not any(common):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Given:
    """Numbers that the ranks passed to a collective, each by rank."""

    values: Sequence[Sequence[float]]
    first: ResultExchanged  # first call of rank 0


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gathered rows of a collective, one label for each sample."""

    operation: str  # collective
    location: Location | None  # line of the call
    rows: Sequence[Sequence[int]]  # labels of each rank
    # (rank, row number) of each row, in the possible orders of the joined result: call by call, and rank by rank
    orders: Sequence[Sequence[tuple[int, int]]]
    # rows as floating-point numbers; empty for labels
    values: Sequence[Sequence[tuple[float, ...]]] = ()


def _lines(of_ranks: Sequence[Evaluated]) -> Iterator[list[list[ResultExchanged]]]:
    """Yield the calls of each line, by rank, if all ranks made equally many."""
    keys = dict.fromkeys((one.operation, one.location, one.during) for one in of_ranks[0].exchanged)
    for key in keys:
        calls = [[o for o in one.exchanged if (o.operation, o.location, o.during) == key] for one in of_ranks]
        if len({len(of_rank) for of_rank in calls}) == 1:
            yield calls


def given_numbers(of_ranks: Sequence[Evaluated]) -> Iterator[Given]:
    """Yield numbers that every rank passed to a collective, summed over a loop's batches."""
    for calls in _lines(of_ranks):
        first = calls[0][0]
        if "gather" in first.operation and _are_of_samples(of_ranks, calls):
            continue
        numbers = [
            [(*one.numbers, *(() if one.total is None or len(one.rows) else (one.total,))) for one in of_rank]
            for of_rank in calls
        ]
        if first.during:  # sum over the batches
            several = len({len(one) for of_rank in numbers for one in of_rank}) > 1
            numbers = [[] if several else [tuple(map(sum, zip(*of_rank, strict=True)))] for of_rank in numbers]
        for of_call in zip(*numbers, strict=True):  # one function may reduce a number, then a pair
            if len(set(map(len, of_call))) == 1:
                yield Given(list(zip(*of_call, strict=True)), first)


def _are_of_samples(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> bool:
    """Return True if the ranks pass one label per sample."""
    pairs = [(len(of_rank[0].rows), one) for of_rank, one in zip(calls, of_ranks, strict=True)]
    return all(1 < rows and rows in (one.samples, min(one.batch, one.samples)) for rows, one in pairs)


def gathered_labels(of_ranks: Sequence[Evaluated]) -> list[Gathered]:
    """Return gathered rows with one label for each sample of each rank."""
    lines: dict[tuple[str, Location | None], list[list[ResultExchanged]]] = {}
    for number, one in enumerate(of_ranks):
        for each in one.exchanged:
            if "gather" in each.operation and len(each.rows):
                lines.setdefault((each.operation, each.location), [[] for _ in of_ranks])[number].append(each)
    return [found for calls in lines.values() for found in _gathered_at(of_ranks, calls)]


def _gathered_at(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    """Return the gathered rows of the calls of one line."""
    during = [[one for one in of_rank if one.during] for of_rank in calls]
    if any(during):
        # A prefetching loader ends before its last batch is processed.
        whole = [
            [one for one in of_rank if one.during or one.evaluation in (None, (of.held.loader, of.held.number))]
            for of_rank, of in zip(calls, of_ranks, strict=True)
        ]
        return _in_turn(of_ranks, whole) or _in_turn(of_ranks, during)
    if len(set(map(len, calls))) > 1:
        return []
    return [found for of_call in zip(*calls, strict=True) for found in _in_turn(of_ranks, [[one] for one in of_call])]


def _in_turn(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    """Join the calls of each quantity; several may alternate (predictions, labels)."""
    things = sum(len(one.rows) for one in calls[0]) // max(1, of_ranks[0].samples)
    found = []
    for turn in range(things if len(set(map(len, calls))) == 1 and len(calls[0]) % max(1, things) == 0 else 0):
        chunks = [of_rank[turn::things] for of_rank in calls]
        rows = [[row for one in of_rank for row in one.rows] for of_rank in chunks]
        if any(len(of_rank) != one.samples for of_rank, one in zip(rows, of_ranks, strict=True)):
            return []
        numbers = [itertools.count() for _ in chunks]
        by_call = [
            (rank, next(numbers[rank]))
            for of_call in zip(*chunks, strict=True)
            for rank, one in enumerate(of_call)
            for _ in one.rows
        ]
        by_rank = sorted(by_call)
        values = [[value for one in of_rank for value in _by_row(one)] for of_rank in chunks]
        found.append(Gathered(chunks[0][0].operation, chunks[0][0].location, rows, (by_call, by_rank), values))
    return found


def _by_row(one: ResultExchanged) -> Iterator[tuple[float, ...]]:
    """Yield the floating-point numbers of each row."""
    width, rest = divmod(len(one.values), max(1, len(one.rows)))
    return (tuple(one.values[n * width : (n + 1) * width]) for n in range(len(one.rows) if width and not rest else 0))


def common(of_ranks: Sequence[Evaluated], kind: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each key that is present on every rank, with its values by rank."""
    by_rank = [getattr(one.held, kind) for one in of_ranks]
    return ((key, [one[key] for one in by_rank]) for key in by_rank[0] if all(key in one for one in by_rank))


def numbers_shown(one: Evaluated) -> Iterator[tuple[MetricShown, ShownNumber]]:
    """Yield each shown number with its record."""
    return ((shown, number) for shown in one.shown for number in shown.numbers)


def first_shown(
    of_ranks: Sequence[Evaluated], wrong: float, *right: float, digits: int = _FEWEST_DIGITS
) -> MetricShown | None:
    """Return the record that shows `wrong`, or None if a `right` value is shown."""
    if any(is_close(wrong, value) or is_shown(of_ranks, value, digits) for value in right):
        return None
    return next(_showing(of_ranks, wrong, digits), None)


def is_shown(of_ranks: Sequence[Evaluated], value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Return True if any rank shows a number."""
    return next(_showing(of_ranks, value, digits), None) is not None


def _showing(of_ranks: Sequence[Evaluated], value: float, digits: int) -> Iterator[MetricShown]:
    """Yield the records where a rank shows a number, as is or in percent."""
    every = (found for one in of_ranks for found in numbers_shown(one))
    return (shown for shown, number in every if any(shows(number, one, digits) for one in (value, 100 * value)))


def shows(number: ShownNumber, value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Check if a value is shown, as float or with enough printed digits."""
    if is_exact(number, value):
        return True
    if number.values and not (number.text and number.values == (float(number.text),)):
        return False
    if significant_digits(number.text) < max(digits, _FEWEST_DIGITS) or "e" in number.text:
        return False
    return f"{value:.{len(number.text.partition('.')[2])}f}" == number.text


def is_exact(number: ShownNumber, value: float) -> bool:
    """Return True if the program has the value, as is or in percent."""
    return any(is_close(scale * own, value) for own in number.values for scale in (1, 100))


def significant_digits(text: str) -> int:
    """Count the printed digits, without leading zeros."""
    return len(text.partition("e")[0].lstrip("-").replace(".", "").lstrip("0"))


def is_close(one: float, other: float) -> bool:
    """Return True if two numbers are equal to float32 precision."""
    return math.isclose(one, other, rel_tol=_SAME)
