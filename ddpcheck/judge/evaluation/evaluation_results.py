"""What the ranks' evaluations have in common: what was given to collectives, gathered, and shown, brought together.

Read by the judges of `judge.evaluation.script_evaluation`. Metrics of pairs of what was predicted for a sample, and its
label or its target, are as `torch.nn.functional`, torchmetrics and scikit-learn define them, but for a scale that is
left to who compares.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import correlation, fmean
from typing import Literal

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Location

Row = tuple[float, ...]
Metric = Callable[[Sequence[tuple[Row, Row]]], float]
_ROUNDING = 1e-9
_Of = Callable[[Sequence[float], Sequence[float]], float]


def accuracy(pairs: Sequence[tuple[Row, Row]]) -> float:
    """How many are the same."""
    return sum(row == label for row, label in pairs) / len(pairs)


def is_scaled(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Whether these are others in the same order, each times one number and plus another."""
    if len(numbers) != len(others) or len(set(others)) < 2:
        return False
    try:
        return abs(correlation(numbers, others)) > 1 - _ROUNDING
    except (ArithmeticError, ValueError):
        return False


def _of(metric: _Of) -> Metric:
    """The metric of all numbers of all rows; not a number where there is none."""

    def of_pairs(pairs: Sequence[tuple[Row, Row]]) -> float:
        predicted = [x for row, _ in pairs for x in row]
        target = [y for _, row in pairs for y in row]
        try:
            return metric(predicted, target)
        except (ArithmeticError, ValueError):
            return math.nan

    return of_pairs


def _mean_of(error: Callable[[float, float], float]) -> _Of:
    return lambda p, t: fmean([error(x, y) for x, y in zip(p, t, strict=True)])


_squared = _mean_of(lambda x, y: (x - y) * (x - y))
_absolute = _mean_of(lambda x, y: abs(x - y))


def _smooth(x: float, y: float) -> float:
    apart = abs(x - y)
    return apart * apart / 2 if apart < 1 else apart - 0.5


def _variance(numbers: Sequence[float]) -> float:
    mean = fmean(numbers)
    return fmean([(x - mean) ** 2 for x in numbers])


def _concordance(p: Sequence[float], t: Sequence[float]) -> float:
    both = correlation(p, t) * math.sqrt(_variance(p) * _variance(t))
    return 2 * both / (_variance(p) + _variance(t) + (fmean(p) - fmean(t)) ** 2)


def _ranks(numbers: Sequence[float]) -> list[float]:
    """The place of each in their order; that of equal ones is their mean."""
    if any(map(math.isnan, numbers)):
        return [math.nan] * len(numbers)  # they have no order
    found = [0.0] * len(numbers)
    begin = 0
    for _, equal in groupby(sorted(range(len(numbers)), key=numbers.__getitem__), numbers.__getitem__):
        ones = list(equal)
        for one in ones:
            found[one] = begin + (len(ones) + 1) / 2
        begin += len(ones)
    return found


def _area(scores: Sequence[float], labels: Sequence[float]) -> float:
    """The area under the receiver operating characteristic."""
    positive = [rank for rank, label in zip(_ranks(scores), labels, strict=True) if label == 1]
    many, others = len(positive), len(labels) - len(positive)
    return (math.fsum(positive) - many * (many + 1) / 2) / (many * others)


_explained: _Of = lambda p, t: 1 - _variance([x - y for x, y in zip(p, t, strict=True)]) / _variance(t)  # noqa: E731

OF_NUMBERS: Mapping[str, Metric] = {
    "mean squared error": _of(_squared),
    "mean absolute error": _of(_absolute),
    "root mean squared error": _of(lambda p, t: math.sqrt(_squared(p, t))),
    "sum of squared errors": _of(lambda p, t: len(p) * _squared(p, t)),
    "sum of absolute errors": _of(lambda p, t: len(p) * _absolute(p, t)),
    "norm of the errors": _of(lambda p, t: math.sqrt(len(p) * _squared(p, t))),
    "relative error": _of(lambda p, t: math.sqrt(_squared(p, t) / fmean([y * y for y in t]))),
    "largest error": _of(lambda p, t: max(abs(x - y) for x, y in zip(p, t, strict=True))),
    "median absolute error": _of(lambda p, t: sorted(abs(x - y) for x, y in zip(p, t, strict=True))[(len(p) - 1) // 2]),
    "smooth L1 loss": _of(_mean_of(_smooth)),
    "mean absolute percentage error": _of(_mean_of(lambda x, y: abs((x - y) / y))),
    "coefficient of determination": _of(lambda p, t: 1 - _squared(p, t) / _variance(t)),
    "explained variance": _of(_explained),
    "correlation": _of(correlation),
    "rank correlation": _of(lambda p, t: correlation(_ranks(p), _ranks(t))),
    "concordance": _of(_concordance),
    "cosine similarity": _of(
        lambda p, t: math.fsum(x * y for x, y in zip(p, t, strict=True)) / (math.hypot(*p) * math.hypot(*t))
    ),
}

OF_SCORES: Mapping[str, Metric] = {
    "area under the curve": _of(_area),
    "cross entropy": _of(_mean_of(lambda x, y: -(y * math.log(x) + (1 - y) * math.log(1 - x)))),
    "mean squared error": _of(_squared),
    "mean absolute error": _of(_absolute),
    "correlation": _of(correlation),
}


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


def are_quotients(values: Sequence[float], sums: Sequence[float], counts: Sequence[int]) -> bool:
    """Whether each rank's value is its sum divided by its count, as it is or in per cent."""
    means = [one / count for one, count in zip(sums, counts, strict=True)]
    return any(
        all(is_close(value, scale * mean) for value, mean in zip(values, means, strict=True)) for scale in (1, 100)
    )


def are_other_data(of_ranks: Sequence[Evaluated]) -> bool:
    """Whether an index is known to be another sample on another rank: the datasets are the ranks' own."""
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

    operation: str
    location: Location | None
    values: Sequence[Sequence[float]]


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
            [(*one.numbers, *(() if one.total is None else (one.total,))) for one in of_rank] for of_rank in calls
        ]
        if first.during:  # in each batch: the sums of them
            several = len({len(one) for of_rank in numbers for one in of_rank}) > 1
            numbers = [[] if several else [tuple(map(sum, zip(*of_rank, strict=True)))] for of_rank in numbers]
        for of_call in zip(*numbers, strict=True):  # a function of the program's may reduce a number, and then a pair
            if len(set(map(len, of_call))) == 1:
                yield Given(first.operation, first.location, list(zip(*of_call, strict=True)))


def _are_of_samples(of_ranks: Sequence[Evaluated], calls: Sequence[Sequence[ResultExchanged]]) -> bool:
    """Whether it is a label for each sample that the ranks give first, and no number of theirs."""
    rows = [len(of_rank[0].rows) for of_rank in calls]
    return min(rows) > 1 and all(
        count in (one.samples, min(one.batch, one.samples)) for count, one in zip(rows, of_ranks, strict=True)
    )


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


def equal_rows(one: Sequence[int], other: Sequence[int]) -> list[bool]:
    """Whether they are the same, row by row."""
    return [a == b for a, b in zip(one, other, strict=True)]


def common_keys(of_ranks: Sequence[Evaluated]) -> list[str]:
    """The names of the numbers that every rank holds."""
    return [key for key in of_ranks[0].held.numbers if all(key in one.held.numbers for one in of_ranks)]


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
    """Whether a rank shows a number."""
    return next(_showing(of_ranks, value, digits), None) is not None


def _showing(of_ranks: Sequence[Evaluated], value: float, digits: int) -> Iterator[MetricShown]:
    """Where a rank shows a number, as it is or in per cent."""
    scaled = value, 100 * value
    every = (found for one in of_ranks for found in numbers_shown(one))
    return (shown for shown, number in every if any(shows(number, one, digits) for one in scaled))


def shows(number: ShownNumber, value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Whether it is the value that is shown: the number that the program holds, or one that is printed like it, with so
    many digits.
    """
    if any(is_close(held, value) or is_close(100 * held, value) for held in number.values):
        return True
    if number.values and not (number.text and number.values == (float(number.text),)):
        return False
    text = number.text.lstrip("-")
    spelled, _, _exponent = text.partition("e")
    if len(spelled.replace(".", "").lstrip("0")) < max(digits, _FEWEST_DIGITS) or "e" in text:
        return False
    return f"{value:.{len(text.partition('.')[2])}f}" == number.text


def is_close(one: float, other: float) -> bool:
    """Whether two numbers are the same, as far as float32 goes."""
    return math.isclose(one, other, rel_tol=_SAME)
