"""Evaluation passes, exchanged results and shown numbers of all ranks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Location

_TOLERANCE = 2e-6  # relative tolerance, of float32
_FEWEST_DIGITS = 3  # printed digits needed to identify a number by its text


@dataclass(frozen=True, slots=True)
class RankEvaluation:
    """Evaluation on one rank, with numbers exchanged and shown until training continues."""

    loader: LoaderPass
    results: EvaluationPass
    exchanged: Sequence[ResultExchanged]
    shown: Sequence[MetricShown]
    subset: Sequence[int] = ()
    compared: Sequence[RowsCompared] = ()

    @property
    def samples(self) -> int:
        return len(self.loader.indices)

    @property
    def batch(self) -> int:
        """Batch size; computed from the number of batches if the batch sampler has none."""
        return max(self.loader.batch_size, -(-self.samples // max(1, self.loader.batches)))

    @property
    def batch_sizes(self) -> list[int]:
        return [min(self.batch, self.samples - first) for first in range(0, self.samples, max(1, self.batch))]


def data_differ(evals: Sequence[RankEvaluation]) -> bool:
    """Return True if the same dataset index is a different sample on another rank."""
    first, *others = (ev.loader for ev in evals)
    for loader in others:
        if first.digest and loader.digest and first.digest != loader.digest:
            return True
        common_value = [
            rows[index] == loader.contents[part][index]
            for part, rows in first.contents.items()
            for index in rows.keys() & loader.contents.get(part, {}).keys()
        ]
        if common_value and not any(common_value):
            return True
    return False


@dataclass(frozen=True, slots=True)
class ExchangedNumbers:
    """Numbers that ranks passed to one collective; each number is a sequence by rank."""

    values: Sequence[Sequence[float]]
    first: ResultExchanged  # first call of rank 0


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows that a collective gathers from the ranks, one for each sample."""

    operation: str  # collective
    location: Location | None  # line of the call
    rows: Sequence[Sequence[int]]  # labels of each rank
    # (rank, row number) of each row, in the possible orders of the joined result: call by call, and rank by rank
    orders: Sequence[Sequence[tuple[int, int]]]
    # rows as floating-point numbers; empty for labels
    values: Sequence[Sequence[tuple[float, ...]]] = ()


def _calls_by_line(evals: Sequence[RankEvaluation]) -> Iterator[list[list[ResultExchanged]]]:
    """Yield, for each line, its collective calls by rank, if ranks call equally often."""
    keys = dict.fromkeys((call.operation, call.location, call.during) for call in evals[0].exchanged)
    for key in keys:
        calls = [[call for call in ev.exchanged if (call.operation, call.location, call.during) == key] for ev in evals]
        if len({len(rank_calls) for rank_calls in calls}) == 1:
            yield calls


def exchanged_numbers(evals: Sequence[RankEvaluation], *, by_size: bool = False) -> Iterator[ExchangedNumbers]:
    """Yield numbers passed to collectives, summed over a loop's batches (`by_size`: weighted by size)."""
    for calls in _calls_by_line(evals):
        first = calls[0][0]
        if "gather" in first.operation and _have_label_per_sample(evals, calls):
            continue
        numbers = [
            [(*call.numbers, *(() if call.total is None or len(call.rows) else (call.total,))) for call in rank_calls]
            for rank_calls in calls
        ]
        if first.during:  # sum over the batches
            if len({len(row) for rows in numbers for row in rows}) > 1:
                continue
            pairs = [(r, ev.batch_sizes if by_size else [1] * len(r)) for ev, r in zip(evals, numbers, strict=True)]
            numbers = [[tuple(sum(map(operator.mul, x, n)) for x in zip(*r, strict=True))] for r, n in pairs]
        for call_numbers in zip(*numbers, strict=True):  # one function may reduce a number, then a pair
            if len(set(map(len, call_numbers))) == 1:
                yield ExchangedNumbers(list(zip(*call_numbers, strict=True)), first)


def _have_label_per_sample(evals: Sequence[RankEvaluation], calls: Sequence[Sequence[ResultExchanged]]) -> bool:
    pairs = [(len(rank_calls[0].rows), ev) for rank_calls, ev in zip(calls, evals, strict=True)]
    return all(1 < rows and rows in (ev.samples, min(ev.batch, ev.samples)) for rows, ev in pairs)


def gathered_labels(evals: Sequence[RankEvaluation]) -> list[Gathered]:
    """Return labels that a collective gathered, one for each sample of each rank."""
    lines: dict[tuple[str, Location | None], list[list[ResultExchanged]]] = {}
    for number, ev in enumerate(evals):
        for call in ev.exchanged:
            if "gather" in call.operation and len(call.rows):
                lines.setdefault((call.operation, call.location), [[] for _ in evals])[number].append(call)
    return [gathered for calls in lines.values() for gathered in _gathered_rows(evals, calls)]


def _gathered_rows(evals: Sequence[RankEvaluation], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    during = [[call for call in rank_calls if call.during] for rank_calls in calls]
    if any(during):
        # A prefetching loader ends before its last batch is processed.
        extended = [
            [
                call
                for call in rank_calls
                if call.during or call.evaluation in (None, (ev.results.loader, ev.results.number))
            ]
            for rank_calls, ev in zip(calls, evals, strict=True)
        ]
        return _join_alternating(evals, extended) or _join_alternating(evals, during)
    if len(set(map(len, calls))) > 1:
        return []
    return [
        gathered
        for group in zip(*calls, strict=True)
        for gathered in _join_alternating(evals, [[call] for call in group])
    ]


def _join_alternating(evals: Sequence[RankEvaluation], calls: Sequence[Sequence[ResultExchanged]]) -> list[Gathered]:
    """Concatenate the rows of calls that gather one quantity, such as predictions.

    Calls of one line may alternate between quantities: predictions, labels, predictions, ...
    """
    quantities = sum(len(call.rows) for call in calls[0]) // max(1, evals[0].samples)
    gathered = []
    for start in range(quantities if len(set(map(len, calls))) == 1 and len(calls[0]) % max(1, quantities) == 0 else 0):
        chunks = [rank_calls[start::quantities] for rank_calls in calls]
        rows = [[row for call in rank_calls for row in call.rows] for rank_calls in chunks]
        if any(len(rank_rows) != ev.samples for rank_rows, ev in zip(rows, evals, strict=True)):
            return []
        numbers = [itertools.count() for _ in chunks]
        by_call = [
            (rank, next(numbers[rank]))
            for group in zip(*chunks, strict=True)
            for rank, call in enumerate(group)
            for _ in call.rows
        ]
        by_rank = sorted(by_call)
        values = [[value for call in rank_calls for value in _row_numbers(call)] for rank_calls in chunks]
        gathered.append(Gathered(chunks[0][0].operation, chunks[0][0].location, rows, (by_call, by_rank), values))
    return gathered


def _row_numbers(call: ResultExchanged) -> Iterator[tuple[float, ...]]:
    width, rest = divmod(len(call.values), max(1, len(call.rows)))
    return (tuple(call.values[n * width : (n + 1) * width]) for n in range(len(call.rows) if width and not rest else 0))


def numbers_shown(ev: RankEvaluation) -> Iterator[tuple[MetricShown, ShownNumber]]:
    """Yield the numbers that a rank shows, each with the output that contains it."""
    return ((shown, number) for shown in ev.shown for number in shown.numbers)


def first_shown(
    evals: Sequence[RankEvaluation], wrong: float, *right: float, digits: int = _FEWEST_DIGITS
) -> MetricShown | None:
    """Return the first output showing number `wrong`, unless an output shows a `right` number."""
    if any(is_close(wrong, value) or output_showing(evals, value, digits) for value in right):
        return None
    return output_showing(evals, wrong, digits)


def output_showing(evals: Sequence[RankEvaluation], value: float, digits: int = _FEWEST_DIGITS) -> MetricShown | None:
    """Return the first output that shows `value`, unchanged or in percent, or None."""
    pairs = (pair for ev in evals for pair in numbers_shown(ev))
    scales = value, 100 * value
    return next((shown for shown, number in pairs if any(shows(number, scaled, digits) for scaled in scales)), None)


def shows(number: ShownNumber, value: float, digits: int = _FEWEST_DIGITS) -> bool:
    """Check if a shown number equals `value` as float, or in enough printed digits."""
    if is_exact(number, value):
        return True
    if number.values and not (number.text and number.values == (float(number.text),)):
        return False
    if significant_digits(number.text) < max(digits, _FEWEST_DIGITS) or "e" in number.text:
        return False
    return f"{value:.{len(number.text.partition('.')[2])}f}" == number.text


def is_exact(number: ShownNumber, value: float) -> bool:
    """Return True if the unrounded shown number is `value`, unchanged or in percent."""
    return any(is_close(scale * x, value) for x in number.values for scale in (1, 100))


def significant_digits(text: str) -> int:
    """Count the printed digits, without leading zeros."""
    return len(text.partition("e")[0].lstrip("-").replace(".", "").lstrip("0"))


def is_close(a: float, b: float) -> bool:
    """Return True if two numbers are equal to float32 precision."""
    return math.isclose(a, b, rel_tol=_TOLERANCE)


def exchange_line(exchanged: ResultExchanged, function: str) -> Location | None:
    """Return the line in `function` that leads to the collective, directly or through helpers."""
    (name, line), *callers = [*exchanged.lines.items(), ("", exchanged.location)]
    return line if name == function or len(callers) < 2 else callers[0][1]
