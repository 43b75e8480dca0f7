"""Metrics of predictions and labels or targets, and of confusion matrices.

Defined as in `torch.nn.functional`, torchmetrics and scikit-learn, up to a scale that the caller tries.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import correlation, fmean

Row = tuple[float, ...]
Metric = Callable[[Sequence[tuple[Row, Row]]], float]
_Of = Callable[[Sequence[float], Sequence[float]], float]
_ROUNDING = 1e-9
_MOST_CLASSES = 16  # classes with per-class metrics


def accuracy(pairs: Sequence[tuple[Row, Row]]) -> float:
    """Return the fraction of equal pairs."""
    return sum(row == label for row, label in pairs) / len(pairs)


def is_scaled(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if `numbers` are an affine function of `others`."""
    if len(numbers) != len(others) or len(set(others)) < 2:
        return False
    try:
        return abs(correlation(numbers, others)) > 1 - _ROUNDING
    except (ArithmeticError, ValueError):
        return False


def _of(metric: _Of) -> Metric:
    """Return the metric over all numbers of all rows; NaN if undefined."""

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
    error = abs(x - y)
    return error * error / 2 if error < 1 else error - 0.5


def _variance(numbers: Sequence[float]) -> float:
    mean = fmean(numbers)
    return fmean([(x - mean) ** 2 for x in numbers])


def _concordance(p: Sequence[float], t: Sequence[float]) -> float:
    both = correlation(p, t) * math.sqrt(_variance(p) * _variance(t))
    return 2 * both / (_variance(p) + _variance(t) + (fmean(p) - fmean(t)) ** 2)


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Return the rank of each number in sorted order, averaged over ties."""
    if any(map(math.isnan, numbers)):
        return [math.nan] * len(numbers)  # NaN has no order
    ranks = [0.0] * len(numbers)
    begin = 0
    for _, equal in groupby(sorted(range(len(numbers)), key=numbers.__getitem__), numbers.__getitem__):
        indices = list(equal)
        for index in indices:
            ranks[index] = begin + (len(indices) + 1) / 2
        begin += len(indices)
    return ranks


def _area(scores: Sequence[float], labels: Sequence[float]) -> float:
    """Return the area under the ROC curve."""
    positive = [rank for rank, label in zip(_ranks(scores), labels, strict=True) if label == 1]
    n_pos, n_neg = len(positive), len(labels) - len(positive)
    return (math.fsum(positive) - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


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


_OF_CLASSES: Mapping[str, Callable[[float, float, float], float]] = {  # of hits, row sum and column sum
    "recall": lambda hits, row, _: hits / row,
    "precision": lambda hits, _, column: hits / column,
    "IoU": lambda hits, row, column: hits / (row + column - hits),
    "F1": lambda hits, row, column: 2 * hits / (row + column),
}


def table_metrics(table: Sequence[float]) -> dict[str, float]:
    """Return metrics by name of a row-major confusion matrix (targets by predictions)."""
    size = math.isqrt(len(table))
    rows = [math.fsum(table[n * size : (n + 1) * size]) for n in range(size)]
    columns = [math.fsum(table[n::size]) for n in range(size)]
    total, metrics = math.fsum(table), dict[str, float]()
    for name, metric in _OF_CLASSES.items():
        by_class = {}
        for n, (row, column) in enumerate(zip(rows, columns, strict=True)):
            with contextlib.suppress(ZeroDivisionError):
                by_class[n] = metric(table[n * size + n], row, column)
        metrics[f"mean {name}"] = math.fsum(by_class.values()) / max(1, len(by_class))
        metrics[f"mean {name} of all classes"] = math.fsum(by_class.values()) / size
        metrics[f"weighted {name}"] = math.fsum(rows[n] * value for n, value in by_class.items()) / max(1, total)
        metrics |= {f"{name} of class {n}": value for n, value in itertools.islice(by_class.items(), _MOST_CLASSES)}
    return {"accuracy": math.fsum(table[:: size + 1]) / max(1, total), **metrics}
