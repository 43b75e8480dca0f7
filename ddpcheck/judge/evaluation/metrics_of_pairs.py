"""Metrics of pairs: of what was predicted for a sample, and its label or its target.

As `torch.nn.functional`, torchmetrics and scikit-learn define them, but for a scale that is left to who compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import correlation, fmean

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
