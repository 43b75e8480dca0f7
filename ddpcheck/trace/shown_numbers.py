"""Numbers shown on ranks and in a single process, and lines that compute them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.parity import EvaluationTraced, NumbersShown, ParityStep
from ddpcheck.findings.report import Location
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.parity import FLOOR, MULTIPLE, NEAR, SMALL, Comparison, Quantity
from ddpcheck.trace.script_facts import entries_of

_FEWEST_DIGITS = 100  # times the last digit; smaller numbers may equal a loss by chance
_LARGEST_LOSS = 1e30
_Key = tuple[str, str, int]
_Line = tuple[int, str, int, str, str]


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A number that both runs show at the same place."""

    entry: NumbersShown  # of rank 0
    index: int  # index of the number in the text
    quantity: Quantity
    is_local: bool = False  # if computed from rank 0's losses only, or different on other ranks

    @property
    def text(self) -> str:
        """The number as rank 0 shows it."""
        return self.entry.numbers[self.index]

    @property
    def source(self) -> tuple[str, str, int]:
        """Key of the number, equal in all epochs: program line, printed text and index."""
        return str(self.entry.location), self.entry.text, self.index


def shown_numbers(comparison: Comparison) -> list[ShownPair]:
    """Return the numbers that both runs show, in order."""
    entries, single_entries = _entries_by_occurrence(comparison.ranks[0]), _entries_by_occurrence(comparison.single)
    noise = _entries_by_occurrence(comparison.noise) if comparison.noise is not None else {}
    other_ranks = [_entries_by_occurrence(rank) for rank in comparison.ranks[1:]]
    losses = [(s.count, loss) for s in entries_of(comparison.ranks[0], ParityStep) for loss in s.losses]
    runs = comparison.ranks[0], comparison.single
    rates = [[rate for step in entries_of(run, ParityStep) for rate in step.rates] for run in runs]
    shown, steps_before = [], dict[_Key, int]()
    for key, entry in entries.items():
        since, steps_before[(*key[:2], 0)] = steps_before.get((*key[:2], 0), 0), entry.steps
        single_entry = single_entries.get(key)
        if single_entry is None or len(single_entry.numbers) != len(entry.numbers):
            continue
        rerun = noise.get(key)
        window = [loss for step, loss in losses if since <= step < entry.steps]
        for index, (text, single) in enumerate(zip(entry.numbers, single_entry.numbers, strict=True)):
            if index in entry.rates or _are_rates((text, single), rates):
                continue
            noise_text = rerun.numbers[index] if rerun is not None and len(rerun.numbers) > index else single
            texts = [rank_entries[key].numbers[index] for rank_entries in other_ranks if key in rank_entries]
            local = any(rank_text != text for rank_text in texts) or _is_of_losses(text, window) or index in entry.known
            padding = comparison.padding if entry.evaluates else 0.0
            shown.append(ShownPair(entry, index, _quantity(text, single, noise_text, padding), local))
    return shown


def _entries_by_occurrence(rank: RankTrace) -> dict[_Key, NumbersShown]:
    entries: dict[_Key, NumbersShown] = {}
    for entry in entries_of(rank, NumbersShown):
        occurrence = 0
        while (key := (str(entry.location), f"{entry.how} {entry.text}", occurrence)) in entries:
            occurrence += 1
        entries[key] = entry
    return entries


def _quantity(text: str, single_text: str, noise_text: str, padding: float) -> Quantity:
    actual, expected, rerun = float(text), float(single_text), float(noise_text)
    scale = max(abs(actual), abs(expected)) or 1.0
    digit = 1.5 * max(map(_last_digit_unit, (text, single_text)))
    difference = max(0.0, abs(actual - expected) - digit) / scale
    largest = max(abs(expected), abs(rerun))
    changed = abs(expected - rerun) / (largest if largest > FLOOR * scale else scale)
    return Quantity(actual, expected, difference, changed, padding)


def _last_digit_unit(text: str) -> float:
    """Return the unit of the last digit: 0.01 for "3.14", but 0.0 for "3"."""
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    return 0.0 if not places else 10.0 ** (int(exponent or 0) - places)


def _are_rates(texts: Sequence[str], rates: Sequence[Sequence[float]]) -> bool:
    """Check if both runs' numbers may be learning rates, which legitimately differ between runs."""
    pairs = [(float(text), _last_digit_unit(text), lrs) for text, lrs in zip(texts, rates, strict=True) if lrs]
    ends = {max(lrs) for _, _, lrs in pairs}
    return len(ends) > 1 and all(min(lrs) - digit <= value <= max(lrs) + digit for value, digit, lrs in pairs)


def _is_of_losses(text: str, losses: Sequence[float]) -> bool:
    value, digit = float(text), _last_digit_unit(text)
    losses = [loss for loss in losses if abs(loss) < _LARGEST_LOSS]
    if not losses or not digit or abs(value) < _FEWEST_DIGITS * digit:
        return False
    total = math.fsum(losses)
    candidates = (losses[-1], total / len(losses), total)
    return any(abs(value - candidate) <= digit for candidate in candidates)


def first_unequal(comparison: Comparison, steps: range, difference: float = NEAR) -> tuple[Location, str] | None:
    """Return (line, name) of the first evaluation variable that differs between runs, or None.

    A variable is equal if its sum, mean, maximum or minimum over ranks is the value in the single process.

    Args:
        comparison: The runs on ranks and in a single process.
        steps: Numbers of optimizer steps after which evaluations are compared.
        difference: Relative difference of the shown number to explain. It is divided by `MULTIPLE`, and limited to
            `NEAR`, for the tolerance of variables.
    """
    *values_by_rank, single_values = (_last_values(rank, steps) for rank in (*comparison.ranks, comparison.single))
    noise = _last_values(comparison.noise, steps) if comparison.noise else single_values
    for key, value in values_by_rank[0].items():
        on_ranks = [numbers for values in values_by_rank if (numbers := values.get(key)) is not None]
        single = single_values.get(key, ())
        if {*map(len, (noise.get(key, ()), *on_ranks))} != {len(single)} or not single:
            continue
        if single == (1.0,) and {*on_ranks} == {(comparison.world_size,)}:
            continue
        scale = max(map(abs, single)) or 1.0
        changed = max(abs(a - b) for a, b in zip(noise[key], single, strict=True)) / scale
        allowed = max(min(NEAR, difference / MULTIPLE), MULTIPLE * changed) * scale
        if changed > SMALL or any(math.dist(reduced, single) <= allowed for reduced in _reductions(on_ranks)):
            continue  # a time or random number, or equal
        copies = (variable for variable, copied in values_by_rank[0].items() if copied == value and value[0] % 1)
        path, line, _, name = next(copies, key)[1:]
        return Location(path, line), name
    return None


def line_of_number(rank: RankTrace, steps: range, text: str) -> tuple[Location, str] | None:
    """Return the evaluation line and variable that first compute a shown number."""
    digit = _last_digit_unit(text)
    for (_, path, line, _, name), value in _last_values(rank, steps).items():
        if len(value) == 1 and abs(value[0] - float(text)) <= digit < abs(value[0]) / _FEWEST_DIGITS:
            return Location(path, line), name
    return None


def _last_values(rank: RankTrace, steps: range) -> dict[_Line, tuple[float, ...]]:
    last_values: dict[_Line, tuple[float, ...]] = {}  # loops assign a different number of values on each rank
    for traced in entries_of(rank, EvaluationTraced):
        for value in traced.values if traced.steps in steps else ():
            key = traced.steps, value.path, value.line, value.function, value.name
            last_values.pop(key, None)
            last_values[key] = value.numbers
    return last_values


def _reductions(numbers: Sequence[tuple[float, ...]]) -> Iterator[list[float]]:
    """Yield maximum and minimum over ranks; also sum and mean unless already all-reduced."""
    for extreme in (max, min):
        yield [extreme(column) for column in zip(*numbers, strict=True)]
    if len(set(numbers)) == 1 and any(number % 1 for number in numbers[0]):
        return  # equal non-integers are already reduced
    sums = [math.fsum(column) for column in zip(*numbers, strict=True)]
    yield sums
    yield [total / len(numbers) for total in sums]
