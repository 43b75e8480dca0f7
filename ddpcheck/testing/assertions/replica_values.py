"""Comparison of the values that ranks hold: from each rank's list of items to the message of an assertion.

Pure functions on plain data that `replica_values_on_rank` gathers. The words are those of `torch.testing.assert_close`.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.wording import counted, format_ranks, plural_verb

_MOST_ITEMS = 8  # that are named after the first one that differs
_MOST_GROUPS = 4  # of ranks, whose numbers are given
_NAN_ADVICE = "NaN does not equal NaN; pass equal_nan=True where it is meant."
_LEAVES = frozenset({"tensor", "number", "value"})  # all other kinds are containers


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How values are compared; the same on every rank."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False
    check_device: bool = True
    check_stride: bool = False

    @property
    def exact(self) -> bool:
        """There is no tolerance."""
        return self.rtol == 0.0 and self.atol == 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One item that a rank holds: a tensor, a number, another plain value, or a container."""

    path: str  # from the argument, as Python spells it; empty for the argument itself
    kind: str  # "tensor", "number", "value", or the kind of container
    value: Any = None  # a number, the text of a plain value, or how many items a container has
    attributes: tuple[tuple[str, str], ...] = ()  # of a tensor: shape, dtype and so on, as far as they are compared
    fingerprint: int = 0  # of a tensor's values
    nans: str = ""  # how many elements are NaN, and where the first one is; empty where none is

    @property
    def key(self) -> Hashable:
        """Everything that must be the same on every rank."""
        return (self.kind, self.attributes, repr(self.value), self.fingerprint)  # 1, 1.0 and True are three things

    def __str__(self) -> str:
        if self.kind == "tensor":
            named = dict(self.attributes)
            return f"a tensor of shape {named['shape']} and dtype {named['dtype']}"
        if self.kind in _LEAVES:
            return str(self.value)
        return f"a {self.kind} of {counted(self.value, 'item')}"


@dataclass(frozen=True, slots=True)
class RankValues:
    """The items of one rank."""

    options: CompareOptions
    entries: tuple[Entry, ...] = ()
    location: str = ""  # of the assertion, as "path:line"
    error: str = ""  # why they cannot be compared


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One item that is not the same on all ranks."""

    path: str
    entries: tuple[Entry | None, ...]  # by rank; None where it holds nothing
    reference: int  # position of the first rank that holds what most ranks hold
    odd: tuple[int, ...]  # positions of those that hold something else; empty where all hold the same NaN
    measurable: bool  # only values of tensors differ, so that they can be measured against each other


Distances = Mapping[str, Sequence[tuple[float, str]]]
"""By path, of each rank: the greatest difference from the reference rank's values, and a text; empty if near enough."""


def usage_error(by_rank: Sequence[RankValues], ranks: Sequence[int]) -> str:
    """Why nothing can be compared, the same on every rank; empty where it can be."""
    if error := first_error([values.error for values in by_rank], ranks):
        return error
    options = [values.options for values in by_rank]
    if len(set(options)) > 1:
        return f"the ranks compare in different ways: {_on_ranks(options, ranks)}; give the same options on every rank"
    return ""


def first_error(errors: Sequence[str], ranks: Sequence[int]) -> str:
    """The first of the ranks' errors, with the ranks that have one unless all have."""
    failed = [rank for rank, error in zip(ranks, errors, strict=True) if error]
    where = "" if len(failed) in (0, len(ranks)) else f" ({format_ranks(failed)})"
    return f"{next(filter(None, errors), '')}{where}"


def holds_nothing(values: RankValues) -> bool:
    """There is no tensor, number or text at all, so that a comparison would always pass."""
    return all(entry.value == "None" for entry in values.entries if entry.kind in _LEAVES)


def differences(by_rank: Sequence[RankValues]) -> list[Mismatch]:
    """The items that are not the same on all ranks, in order; with a tolerance, also those that may be near enough."""
    options = by_rank[0].options
    by_path = [{entry.path: entry for entry in values.entries} for values in by_rank]
    found = []
    for path in dict.fromkeys(path for entries in by_path for path in entries):
        entries = tuple(of_rank.get(path) for of_rank in by_path)
        keys = [entry and entry.key for entry in entries]
        common = Counter(keys).most_common(1)[0][0]
        reference = keys.index(common)
        nans = not options.equal_nan and any(entry and entry.nans for entry in entries)
        if (len(set(keys)) == 1 and not nans) or _numbers_are_close(entries, reference, options):
            continue
        odd = tuple(place for place, key in enumerate(keys) if key != common)
        alike = len({entry and (entry.kind, entry.attributes) for entry in entries}) == 1
        tensors = all(entry and entry.kind == "tensor" for entry in entries)
        found.append(Mismatch(path, entries, reference, odd, measurable=bool(odd) and alike and tensors))
    return found


def _numbers_are_close(entries: Sequence[Entry | None], reference: int, options: CompareOptions) -> bool:
    """The items are numbers of one type, within the tolerance of one of them."""
    values = [entry.value for entry in entries if entry and entry.kind == "number"]
    if len(values) < len(entries) or len(set(map(type, values))) > 1 or isinstance(values[0], bool):
        return False
    want = values[reference]

    def is_close(got: Any) -> bool:
        if got == want or (options.equal_nan and got != got and want != want):
            return True
        distance = abs(got - want)
        return bool(distance <= options.atol + options.rtol * abs(want) and math.isfinite(distance))

    return all(map(is_close, values))


def mismatch_message(
    found: Sequence[Mismatch],
    distances: Distances,
    by_rank: Sequence[RankValues],
    ranks: Sequence[int],
    name: str = "",
) -> str:
    """The message of the assertion on what `differences` found; empty where nothing differs by more than it may.

    An item of which only values differ, and that `distances` lacks, counts as different without numbers. `name` is the
    user's for the argument.
    """
    real = [item for item in found if item.path not in distances or any(text for _, text in distances[item.path])]
    if not real:
        return ""
    first, others = real[0], real[1:]
    lines = _details(first, distances, by_rank[0].options, ranks)
    if spelled_path := _spelled_path(first, name):
        lines += ["", f"The failure occurred for item {spelled_path}"]
    if others:
        lines.append(f"{len(others)} more {plural_verb('item is', 'items are', others)} not the same on all ranks:")
        lines += [_in_a_line(other, distances, name, ranks) for other in others[:_MOST_ITEMS]]
        lines += [f"  and {len(others) - _MOST_ITEMS} more"] if len(others) > _MOST_ITEMS else []
    locations = [values.location for values in by_rank]
    if len(set(locations)) > 1:
        lines.append(f"The ranks did not ask at the same line: {_on_ranks(locations, ranks)}")
    return "\n".join(lines)


def _details(item: Mismatch, distances: Distances, options: CompareOptions, ranks: Sequence[int]) -> list[str]:
    """One item that differs, at length."""
    how = "equal" if options.exact else "close"
    some = [entry for entry in item.entries if entry is not None]
    kinds = {entry.kind for entry in some}
    if None in item.entries or len(kinds) > 1 or not kinds <= _LEAVES:
        how = "Not every rank holds it" if None in item.entries else "The ranks hold different things"
        spelled = _on_ranks([entry or "nothing" for entry in item.entries], ranks)
        return ["Items are not the same on all ranks!", "", f"{how}: {spelled}."]
    if kinds != {"tensor"}:
        what = "Scalars" if kinds == {"number"} else "Values"
        lines = [f"{what} are not {how} on all ranks!", "", f"{_on_ranks(some, ranks)}."]
        return lines if item.odd else [*lines, _NAN_ADVICE]
    lines = [f"Tensor-likes are not {how} on all ranks!", ""]
    if not item.odd:
        return [*lines, f"On every rank, {some[0].nans}.", _NAN_ADVICE]
    if not item.measurable:
        named = [dict(entry.attributes) for entry in some]
        values = {name: [of_rank[name] for of_rank in named] for name in named[0]}
        return lines + [
            f"The values for attribute '{name}' do not match: {_on_ranks(of_ranks, ranks)}."
            for name, of_ranks in values.items()
            if len(set(of_ranks)) > 1
        ]
    odd = _odd_ranks(item, distances, ranks)
    same = [rank for rank in ranks if rank not in odd]
    lines.append(f"{format_ranks(odd).capitalize()} {plural_verb('differs', 'differ', odd)} from {format_ranks(same)}.")
    return lines + _numbers(item, distances, ranks)


def _odd_ranks(item: Mismatch, distances: Distances, ranks: Sequence[int]) -> list[int]:
    """The ranks that differ by more than they may."""
    if item.path not in distances:
        return [ranks[place] for place in item.odd]
    return [rank for rank, (_, text) in zip(ranks, distances[item.path], strict=True) if text]


def _numbers(item: Mismatch, distances: Distances, ranks: Sequence[int]) -> list[str]:
    """How far values differ, the ranks with the greatest differences first."""
    groups: dict[str, list[int]] = {}
    worst_first = sorted(zip(distances.get(item.path, ()), ranks, strict=False), key=lambda pair: -pair[0][0])
    for (_, text), rank in worst_first:
        if text:
            groups.setdefault(text, []).append(rank)
    lines = [
        f"{line} on {format_ranks(odd)} against rank {ranks[item.reference]}"
        for text, odd in list(groups.items())[:_MOST_GROUPS]
        for line in text.splitlines()
    ]
    more = [rank for odd in list(groups.values())[_MOST_GROUPS:] for rank in odd]
    lines += [f"Less far apart: {format_ranks(more)}"] if more else []
    nans = [entry.nans or "no element is NaN" if entry else "" for entry in item.entries]
    return [*lines, f"NaN: {_on_ranks(nans, ranks)}"] if len(set(nans)) > 1 else lines


def _in_a_line(item: Mismatch, distances: Distances, name: str, ranks: Sequence[int]) -> str:
    path = _spelled_path(item, name)
    if None in item.entries:
        holders = [rank for rank, entry in zip(ranks, item.entries, strict=True) if entry]
        return f"  {path}: only on {format_ranks(holders)}"
    if not item.odd:
        return f"  {path}: NaN on every rank"
    what = "values" if item.measurable else "what it is"
    return f"  {path}: {what}, on {format_ranks(_odd_ranks(item, distances, ranks))}"


def _spelled_path(item: Mismatch, name: str) -> str:
    return f"{name}{item.path}" if name or item.path.startswith("[") else item.path.removeprefix(".")


def _on_ranks(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """The values of all ranks, equal ones together: "a on rank 0; b on ranks 1 and 2"."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(str(value), []).append(rank)
    return "; ".join(f"{text} on {format_ranks(of)}" for text, of in groups.items())
