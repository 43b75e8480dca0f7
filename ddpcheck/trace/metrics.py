"""Metrics computed from the results of single ranks, and of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import correlation, fmean

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.trace.evaluation import RankEvaluation, exchanged_numbers, is_close, is_exact, shows, significant_digits
from ddpcheck.trace.replicas import common_values

Row = tuple[float, ...]
Metric = Callable[[Sequence[tuple[Row, Row]]], float]
_FlatMetric = Callable[[Sequence[float], Sequence[float]], float]
_MOST_CLASSES = 16  # classes with per-class metrics


def _on_rows(metric: _FlatMetric) -> Metric:
    """Adapt a metric of flat sequences to (prediction, target) rows; NaN if undefined."""

    def on_pairs(pairs: Sequence[tuple[Row, Row]]) -> float:
        predicted = [x for row, _ in pairs for x in row]
        target = [y for _, row in pairs for y in row]
        try:
            return metric(predicted, target)
        except (ArithmeticError, ValueError):
            return math.nan

    return on_pairs


def _mean_of(error: Callable[[float, float], float]) -> _FlatMetric:
    return lambda p, t: fmean([error(x, y) for x, y in zip(p, t, strict=True)])


_squared_error = _mean_of(lambda x, y: (x - y) * (x - y))
_absolute_error = _mean_of(lambda x, y: abs(x - y))


def _smooth_l1(x: float, y: float) -> float:
    error = abs(x - y)
    return error * error / 2 if error < 1 else error - 0.5


def _variance(numbers: Sequence[float]) -> float:
    mean = fmean(numbers)
    return fmean([(x - mean) ** 2 for x in numbers])


def _concordance(p: Sequence[float], t: Sequence[float]) -> float:
    covariance = correlation(p, t) * math.sqrt(_variance(p) * _variance(t))
    return 2 * covariance / (_variance(p) + _variance(t) + (fmean(p) - fmean(t)) ** 2)


def _sorted_positions(numbers: Sequence[float]) -> list[float]:
    """Return the position of each number in sorted order, from 1, averaged over ties."""
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


def _roc_area(scores: Sequence[float], labels: Sequence[float]) -> float:
    positive = [rank for rank, label in zip(_sorted_positions(scores), labels, strict=True) if label == 1]
    n_pos, n_neg = len(positive), len(labels) - len(positive)
    return (math.fsum(positive) - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)


_explained_variance: _FlatMetric = lambda p, t: 1 - _variance([x - y for x, y in zip(p, t, strict=True)]) / _variance(t)  # noqa: E731
OF_NUMBERS: Mapping[str, Metric] = {
    "mean squared error": _on_rows(_squared_error),
    "mean absolute error": _on_rows(_absolute_error),
    "root mean squared error": _on_rows(lambda p, t: math.sqrt(_squared_error(p, t))),
    "sum of squared errors": _on_rows(lambda p, t: len(p) * _squared_error(p, t)),
    "sum of absolute errors": _on_rows(lambda p, t: len(p) * _absolute_error(p, t)),
    "norm of the errors": _on_rows(lambda p, t: math.sqrt(len(p) * _squared_error(p, t))),
    "relative error": _on_rows(lambda p, t: math.sqrt(_squared_error(p, t) / fmean([y * y for y in t]))),
    "largest error": _on_rows(lambda p, t: max(abs(x - y) for x, y in zip(p, t, strict=True))),
    "median absolute error": _on_rows(
        lambda p, t: sorted(abs(x - y) for x, y in zip(p, t, strict=True))[(len(p) - 1) // 2]
    ),
    "smooth L1 loss": _on_rows(_mean_of(_smooth_l1)),
    "mean absolute percentage error": _on_rows(_mean_of(lambda x, y: abs((x - y) / y))),
    "coefficient of determination": _on_rows(lambda p, t: 1 - _squared_error(p, t) / _variance(t)),
    "explained variance": _on_rows(_explained_variance),
    "correlation": _on_rows(correlation),
    "rank correlation": _on_rows(lambda p, t: correlation(_sorted_positions(p), _sorted_positions(t))),
    "concordance": _on_rows(_concordance),
    "cosine similarity": _on_rows(
        lambda p, t: math.fsum(x * y for x, y in zip(p, t, strict=True)) / (math.hypot(*p) * math.hypot(*t))
    ),
}

OF_SCORES: Mapping[str, Metric] = {
    "area under the curve": _on_rows(_roc_area),
    "cross entropy": _on_rows(_mean_of(lambda x, y: -(y * math.log(x) + (1 - y) * math.log(1 - x)))),
    "mean squared error": _on_rows(_squared_error),
    "mean absolute error": _on_rows(_absolute_error),
    "correlation": _on_rows(correlation),
}

_CLASS_METRICS: Mapping[str, Callable[[float, float, float], float]] = {  # of hits, row sum and column sum
    "recall": lambda hits, row, _: hits / row,
    "precision": lambda hits, _, column: hits / column,
    "IoU": lambda hits, row, column: hits / (row + column - hits),
    "F1": lambda hits, row, column: 2 * hits / (row + column),
}


def table_metrics(table: Sequence[float]) -> dict[str, float]:
    """Return the metrics, by name, of a row-major confusion matrix (targets by predictions)."""
    size = math.isqrt(len(table))
    rows = [math.fsum(table[n * size : (n + 1) * size]) for n in range(size)]
    columns = [math.fsum(table[n::size]) for n in range(size)]
    total, metrics = math.fsum(table), dict[str, float]()
    for name, metric in _CLASS_METRICS.items():
        by_class = {}
        for n, (row, column) in enumerate(zip(rows, columns, strict=True)):
            with contextlib.suppress(ZeroDivisionError):
                by_class[n] = metric(table[n * size + n], row, column)
        metrics[f"mean {name}"] = math.fsum(by_class.values()) / max(1, len(by_class))
        metrics[f"mean {name} of all classes"] = math.fsum(by_class.values()) / size
        metrics[f"weighted {name}"] = math.fsum(rows[n] * value for n, value in by_class.items()) / max(1, total)
        metrics |= {f"{name} of class {n}": value for n, value in itertools.islice(by_class.items(), _MOST_CLASSES)}
    return {"accuracy": math.fsum(table[:: size + 1]) / max(1, total), **metrics}


FEWEST_BITS = 6.5
"""Minimum evidence, in bits, to match a shown number with a metric.

The 20 programs of `tests/healthy_numbers.py` show 590 numbers, of which 30 equal an unrelated metric of one rank in all
digits. 17 of these coincidences have less than 1 bit, 6 have 2 bits or more, and the largest has 6.3 bits: three
digits, among 13 numbers, in one of two evaluations.
"""

_FLOAT_BITS = 19.0  # of a number known to float32 precision
_DIGIT_BITS = math.log2(10)
MEAN = "mean over samples"
_SHARE = "share of the whole set"
_LARGEST_EXPONENT = 50.0  # largest loss for which a perplexity is tried
_MOST_COUNTED_CLASSES = 32
_MOST_QUOTIENT_NUMBERS = 32  # numbers; of more, the quotients are too many to identify one


@dataclass(frozen=True, slots=True)
class RankMetric:
    """Metric of each rank's samples, and of all samples pooled."""

    key: str  # source (number, table or rows), as function and variable
    name: str  # name of the metric
    values: Sequence[float]  # by rank
    pooled: float
    bits: Sequence[float]  # information by rank; little in a value computed from a small integer
    tries: int  # number of candidate metrics for a shown number

    def evidence(self, number: ShownNumber, rank: int | None = None) -> float:
        """Return how surely `number` is this metric, in bits; 0 if it differs.

        Compare with the metric of `rank`, or if None, with the metric of all samples pooled.
        """
        value, bits = (self.pooled, max(self.bits)) if rank is None else (self.values[rank], self.bits[rank])
        if not shows(number, value):
            return 0.0
        of_number = _FLOAT_BITS if is_exact(number, value) else _DIGIT_BITS * significant_digits(number.text)
        return max(0.0, min(of_number, bits) - math.log2(self.tries))

    def is_combined(self, rank: int, evals: Sequence[RankEvaluation]) -> bool:
        """Return True if only `rank` accumulated the numbers of all ranks, as by `reduce`."""
        counts = [ev.results.numbers.get(self.key, value) for ev, value in zip(evals, self.values, strict=True)]
        calls = (call for by_size in (False, True) for call in exchanged_numbers(evals, by_size=by_size))
        sums = [numbers for call in calls if call.first.during for numbers in call.values]
        cases = itertools.product(sums, range(len(evals)), (1, len(evals)))  # a sum, or a mean over the ranks
        return any(
            is_close(counts[rank] * numbers[peer], counts[peer] * math.fsum(numbers) / divisor)
            for numbers, peer, divisor in cases
            if numbers[peer] and peer != rank
        )


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a script, matched between ranks."""

    loop: tuple[object, ...]  # (line of the loop, line that creates the loader, dataset)
    by_rank: Mapping[int, RankEvaluation]

    @property
    def evals(self) -> list[RankEvaluation]:
        """Evaluations of all ranks."""
        return [*self.by_rank.values()]

    @cached_property
    def metrics(self) -> list[RankMetric]:
        """Metrics computed from the ranks' sums, tables and rows, most common first."""
        if min(ev.samples for ev in self.evals) < 1:
            return []
        return [
            *_sum_metrics(self.evals),
            *_table_metrics(self.evals),
            *_row_metrics(self.evals),
            *_ratio_metrics(self.evals),
        ]


def bits_of(number: float) -> float:
    """Return the information of a number in bits; log2(1 + |n|) for integers."""
    if not math.isfinite(number):
        return 0.0
    if is_close(number, round(number)):
        return math.log2(1 + abs(number))
    return _DIGIT_BITS * significant_digits(f"{number:.6g}")


def _forms(
    key: str, name: str, values: Sequence[float], pooled: float, bits: Sequence[float], tries: int
) -> Iterator[RankMetric]:
    """Yield a metric in each form that scripts show: x, 100*x, 1-x, exp(x), sqrt(x)."""
    numbers = [*values, pooled]
    forms = {name: numbers, f"{name}, in per cent": [100 * number for number in numbers]}
    if name != _SHARE and all(0 <= number <= 1 for number in numbers):
        forms |= {f"1 - {name}": [1 - n for n in numbers], f"1 - {name}, in per cent": [100 - 100 * n for n in numbers]}
    if name != _SHARE and all(0 < number < _LARGEST_EXPONENT for number in numbers):
        forms[f"exp({name})"] = [math.exp(number) for number in numbers]
        forms[f"sqrt({name})"] = [math.sqrt(number) for number in numbers]
    for label, (*scaled, total) in forms.items():
        scale = 100 if label.endswith("per cent") else 1
        value_bits = [min(rank_bits, bits_of(value / scale)) for rank_bits, value in zip(bits, scaled, strict=True)]
        yield RankMetric(key, label, scaled, total, value_bits, tries)


def _common_numbers(evals: Sequence[RankEvaluation]) -> dict[str, list[float]]:
    """Return numbers recorded on all ranks, except the sum and trace of confusion matrices."""
    tables = [key.partition(".") for key in common_values([ev.results.tables for ev in evals])]
    parts = {f"{function}.{part}({name})" for function, _, name in tables for part in ("sum", "trace")}
    numbers = common_values([ev.results.numbers for ev in evals])
    return {key: counts for key, counts in numbers.items() if key not in parts}


def _sum_metrics(evals: Sequence[RankEvaluation]) -> Iterator[RankMetric]:
    """Yield metrics that recorded numbers may be: sums to divide, or finished means."""
    samples, batches = [float(ev.samples) for ev in evals], [float(ev.loader.batches) for ev in evals]
    sizes = [float(ev.loader.size) for ev in evals]
    sums = _common_numbers(evals)
    for key, counts in sums.items():
        bits = [*map(bits_of, counts)]
        for name, divisors in {MEAN: samples, "mean over batches": batches, _SHARE: sizes}.items():
            if min(divisors) >= 1 and (divisors is samples or divisors != samples):
                values = [count / divisor for count, divisor in zip(counts, divisors, strict=True)]
                pooled = sum(counts) / sizes[0] if name == _SHARE else _weighted_mean(values, samples)
                yield from _forms(key, name, values, pooled, bits, len(sums))
        if any(count != int(count) for count in counts):  # not a counter
            yield from _forms(key, "", counts, _weighted_mean(counts, samples), bits, len(sums))


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _ratio_metrics(evals: Sequence[RankEvaluation]) -> Iterator[RankMetric]:
    """Yield quotients of two variables of one function, e.g. sum / tokens."""
    sums = _common_numbers(evals)
    for key, divisor_key in itertools.permutations(sums, 2) if len(sums) <= _MOST_QUOTIENT_NUMBERS else ():
        if key.partition(".")[0] != divisor_key.partition(".")[0] or _container_of(key) != _container_of(divisor_key):
            continue
        counts, divisors = sums[key], sums[divisor_key]
        if any(divisor < 2 or divisor != int(divisor) for divisor in divisors):
            continue
        values = [count / divisor for count, divisor in zip(counts, divisors, strict=True)]
        bits = [bits_of(count) + bits_of(divisor) for count, divisor in zip(counts, divisors, strict=True)]
        yield from _forms(key, f"mean over {divisor_key}", values, sum(counts) / sum(divisors), bits, len(sums) ** 2)


def _container_of(key: str) -> str:
    """Return the tensor or list that contains a number: "f.x" for "f.x[3]", or ''."""
    return key.rpartition("[")[0] if key.endswith("]") and key.rpartition("[")[2][:-1].isdigit() else ""


def _table_metrics(evals: Sequence[RankEvaluation]) -> Iterator[RankMetric]:
    for key, tables in common_values([ev.results.tables for ev in evals]).items():
        if len(set(map(len, tables))) == 1:
            yield from _metrics_by_key(
                key, [table_metrics(table) for table in tables], table_metrics([*map(sum, zip(*tables, strict=True))])
            )


def _row_metrics(evals: Sequence[RankEvaluation]) -> Iterator[RankMetric]:
    """Yield metrics of two per-sample sequences of each rank, e.g. scores and labels."""
    rows = common_values([ev.results.rows for ev in evals])
    for key, label_key in itertools.permutations(rows, 2):
        pairs = [list(zip(*columns, strict=True)) for columns in zip(rows[key], rows[label_key], strict=True)]
        if any(len(rank_pairs) != ev.samples for rank_pairs, ev in zip(pairs, evals, strict=True)):
            continue
        all_pairs = list(itertools.chain.from_iterable(pairs))
        yield from _metrics_by_key(
            f"{key}, {label_key.partition('.')[2]}", [*map(_pair_metrics, pairs)], _pair_metrics(all_pairs)
        )


def _pair_metrics(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    classes = sorted({number for pair in pairs for number in pair})
    if len(classes) <= _MOST_COUNTED_CLASSES and all(number >= 0 == number % 1 for number in classes):
        index = {number: n for n, number in enumerate(classes)}
        table = [0.0] * len(classes) ** 2
        for predicted, label in pairs:
            table[index[label] * len(classes) + index[predicted]] += 1
        return table_metrics(table)
    labels = {label for _, label in pairs}
    rows = [((x,), (y,)) for x, y in pairs]
    return {name: metric(rows) for name, metric in (OF_SCORES if labels <= {0, 1} else OF_NUMBERS).items()}


def _metrics_by_key(
    key: str, by_rank: Sequence[Mapping[str, float]], overall: Mapping[str, float]
) -> Iterator[RankMetric]:
    for name, pooled in overall.items():
        values = [metrics.get(name, math.nan) for metrics in by_rank]
        if all(map(math.isfinite, (*values, pooled))):
            yield from _forms(key, name, values, pooled, [_FLOAT_BITS] * len(values), len(overall))


def evaluations_of(
    loaders: Sequence[Sequence[LoaderPass]],
    passes: Sequence[Sequence[EvaluationPass]],
    exchanged: Sequence[Sequence[ResultExchanged]],
    shown: Sequence[Sequence[MetricShown]],
    compared: Sequence[Sequence[RowsCompared]],
) -> list[Evaluation]:
    """Group log entries into evaluations that are matched between ranks; arguments are by rank."""
    by_key: dict[tuple[object, ...], dict[int, RankEvaluation]] = {}
    records = zip(loaders, passes, exchanged, shown, compared or [()] * len(loaders), strict=True)
    for rank, (rank_loaders, rank_passes, rank_calls, rank_outputs, rank_rows) in enumerate(records):
        by_pass = {(loader.loader, loader.number): loader for loader in rank_loaders}
        subsets = {loader.loader: loader.subset for loader in rank_loaders if len(loader.subset)}
        counts: Counter[tuple[object, ...]] = Counter()  # of equal pass numbers: the loader was recreated
        for eval_pass in {(p.loader, p.number): p for p in rank_passes}.values():  # a pass may be written twice
            if (loader := by_pass.get((eval_pass.loader, eval_pass.number))) is not None and loader.exhausted:
                key = (loader.location, loader.built_at, loader.dataset, loader.number)
                counts[key] += 1
                by_key.setdefault((*key, counts[key]), {})[rank] = RankEvaluation(
                    loader,
                    eval_pass,
                    [
                        call
                        for call in rank_calls
                        if call.round == eval_pass.round
                        and (not call.during or call.evaluation in (None, (eval_pass.loader, eval_pass.number)))
                    ],
                    [output for output in rank_outputs if output.round == eval_pass.round],
                    subsets.get(loader.loader, ()),
                    [rows for rows in rank_rows if rows.round == eval_pass.round],
                )
    return [Evaluation(key[:3], by_rank) for key, by_rank in by_key.items()]
