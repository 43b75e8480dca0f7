"""What the ranks' evaluations have in common: what was given to collectives, gathered, and shown, brought together."""

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

_SAME = 2e-6  # relative: of float32
_FEWEST_DIGITS = 3  # of a printed number, before it is known by what is printed alone


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation on one rank: its pass over the loader, and what was exchanged and shown in its round."""

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
        """Samples of a batch: a sampler of batches may not say."""
        return max(self.loader.batch_size, -(-self.samples // max(1, self.loader.batches)))


def places_of(of_ranks: Sequence[Evaluated]) -> list[list[int]]:
    """Where each rank's samples are in the dataset: in that of all ranks, where each has a `Subset` of its own."""
    subset = of_ranks[0].subset
    common = all(list(one.subset) == list(subset) for one in of_ranks)
    places = {index: place for place, index in enumerate(subset)} if common else {}
    return [[places.get(index, index) for index in one.loader.indices] for one in of_ranks]


def given_by_loader(
    of_ranks: Sequence[Evaluated], places: Sequence[Sequence[int]], kind: Literal["classes", "targets"]
) -> dict[int, Row]:
    """By place in the dataset, the label or the number that came with each sample; none unless all have one."""
    given = [getattr(one.loader, kind) for one in of_ranks]
    if any(len(values) != one.samples for values, one in zip(given, of_ranks, strict=True)):
        return {}
    pairs = zip(itertools.chain(*places), itertools.chain(*given), strict=True)
    return {place: (float(value),) for place, value in pairs}


def are_other_data(of_ranks: Sequence[Evaluated]) -> bool:
    """Check if an index is known to be another sample on another rank: the datasets are the ranks' own."""
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
    """What the ranks have given to a collective: each number, by rank."""

    values: Sequence[Sequence[float]]
    first: ResultExchanged  # the first call of rank 0


@dataclass(frozen=True, slots=True)
class Gathered:
    """A label for each sample, which collectives have brought together."""

    operation: str  # the collective
    location: Location | None  # its line
    rows: Sequence[Sequence[int]]  # those of each rank
    # the rank and the number of each of them, in the orders in which a program joins what the collectives bring: call
    # by call, and rank by rank
    orders: Sequence[Sequence[tuple[int, int]]]
    # the rows as floating-point numbers, where they are; else nothing
    values: Sequence[Sequence[tuple[float, ...]]] = ()


def _lines(of_ranks: Sequence[Evaluated]) -> Iterator[list[list[ResultExchanged]]]:
    """The calls of each line, by rank, of lines from which every rank has made as many."""
    keys = dict.fromkeys((one.operation, one.location, one.during) for one in of_ranks[0].exchanged)
    for key in keys:
        calls = [[o for o in one.exchanged if (o.operation, o.location, o.during) == key] for one in of_ranks]
        if len({len(of_rank) for of_rank in calls}) == 1:
            yield calls


def given_numbers(of_ranks: Sequence[Evaluated]) -> Iterator[Given]:
    """The numbers that every rank has given to a collective, those of a loop over batches added up."""
    for calls in _lines(of_ranks):
        first = calls[0][0]
        if "gather" in first.operation and _are_of_samples(of_ranks, calls):
            continue
        numbers = [
            [(*one.numbers, *(() if one.total is None or len(one.rows) else (one.total,))) for one in of_rank]
            for of_rank in calls
        ]
        if first.during:  # in each batch: the sums of them
            several = len({len(one) for of_rank in numbers for one in of_rank}) > 1
            numbers = [[] if several else [tuple(map(sum, zip(*of_rank, strict=True)))] for of_rank in numbers]
        for of_call in zip(*numbers, strict=True):  # a function of the program's may reduce a number, and then a pair
            if len(set(map(len, of_call))) == 1:
                yield Given(list(zip(*of_call, strict=True)), first)


def _are_of_samples(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> bool:
    """Check if it is a label for each sample that the ranks give first, and no number of theirs."""
    pairs = [(len(of_rank[0].rows), one) for of_rank, one in zip(calls, of_ranks, strict=True)]
    return all(1 < rows and rows in (one.samples, min(one.batch, one.samples)) for rows, one in pairs)


def gathered_labels(of_ranks: Sequence[Evaluated]) -> list[Gathered]:
    """What collectives have brought together, as far as there is one label for each sample of each rank."""
    lines: dict[tuple[str, Location | None], list[list[ResultExchanged]]] = {}
    for number, one in enumerate(of_ranks):
        for each in one.exchanged:
            if "gather" in each.operation and len(each.rows):
                lines.setdefault((each.operation, each.location), [[] for _ in of_ranks])[number].append(each)
    return [found for calls in lines.values() for found in _gathered_at(of_ranks, calls)]


def _gathered_at(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    """The same, of the calls of one line, by rank."""
    during = [[one for one in of_rank if one.during] for of_rank in calls]
    if any(during):
        # A loader that fetches a batch ahead has ended before its last batch is at work.
        whole = [
            [one for one in of_rank if one.during or one.evaluation in (None, (of.held.loader, of.held.number))]
            for of_rank, of in zip(calls, of_ranks, strict=True)
        ]
        return _in_turn(of_ranks, whole) or _in_turn(of_ranks, during)
    if len(set(map(len, calls))) > 1:
        return []
    return [found for of_call in zip(*calls, strict=True) for found in _in_turn(of_ranks, [[one] for one in of_call])]


def _in_turn(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    """What the calls bring: of one thing batch by batch, or of several in turn, as predictions and their labels are."""
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
    """The floating-point numbers of each row."""
    width, rest = divmod(len(one.values), max(1, len(one.rows)))
    return (tuple(one.values[n * width : (n + 1) * width]) for n in range(len(one.rows) if width and not rest else 0))


def common(of_ranks: Sequence[Evaluated], kind: str) -> Iterator[tuple[str, list[Any]]]:
    """What the functions of every rank hold under the same name, by rank."""
    by_rank = [getattr(one.held, kind) for one in of_ranks]
    return ((key, [one[key] for one in by_rank]) for key in by_rank[0] if all(key in one for one in by_rank))


def numbers_shown(one: Evaluated) -> Iterator[tuple[MetricShown, ShownNumber]]:
    """Each number, and where it is shown."""
    return ((shown, number) for shown in one.shown for number in shown.numbers)


def first_shown(
    of_ranks: Sequence[Evaluated], wrong: float, *right: float, digits: int = _FEWEST_DIGITS
) -> MetricShown | None:
    """Where a rank shows the one number, and none any of the others."""
    if any(is_close(wrong, value) or is_shown(of_ranks, value, digits) for value in right):
        return None
    return next(_showing(of_ranks, wrong, digits), None)


def is_shown(of_ranks: Sequence[Evaluated], value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Check if a rank shows a number."""
    return next(_showing(of_ranks, value, digits), None) is not None


def _showing(of_ranks: Sequence[Evaluated], value: float, digits: int) -> Iterator[MetricShown]:
    """Where a rank shows a number, as it is or in per cent."""
    every = (found for one in of_ranks for found in numbers_shown(one))
    return (shown for shown, number in every if any(shows(number, one, digits) for one in (value, 100 * value)))


def shows(number: ShownNumber, value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Check if a value is shown: as the number of the program, or printed with enough digits."""
    if is_exact(number, value):
        return True
    if number.values and not (number.text and number.values == (float(number.text),)):
        return False
    if significant_digits(number.text) < max(digits, _FEWEST_DIGITS) or "e" in number.text:
        return False
    return f"{value:.{len(number.text.partition('.')[2])}f}" == number.text


def is_exact(number: ShownNumber, value: float) -> bool:
    """Check if the program has the value, as it is or in per cent."""
    return any(is_close(scale * own, value) for own in number.values for scale in (1, 100))


def significant_digits(text: str) -> int:
    """The number of printed digits, without leading zeros."""
    return len(text.partition("e")[0].lstrip("-").replace(".", "").lstrip("0"))


def is_close(one: float, other: float) -> bool:
    """Check if two numbers are the same, as far as float32 goes."""
    return math.isclose(one, other, rel_tol=_SAME)
