"""Comparison of the values that ranks hold: from each rank's list of items to the message of an assertion.

Pure functions on plain data that `replica_values_on_rank` gathers. `torch.testing.assert_close` says how far tensors
are apart; which items differ, and on which ranks, is said here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.wording import capitalized, counted, format_ranks, group_by, plural_verb

_MOST_ITEMS = 8  # that are named after the first one that differs
_MOST_GROUPS = 4  # of ranks, whose numbers are given
_NAN_ADVICE = "NaN does not equal NaN; pass equal_nan=True where it is meant."
_TITLES = {"tensor": "Tensor-likes", "number": "Scalars", "value": "Values"}  # of all kinds that are no containers


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
        return str(self.value) if self.kind in _TITLES else f"a {self.kind} of {counted(self.value, 'item')}"


@dataclass(frozen=True, slots=True)
class RankValues:
    """The items of one rank."""

    options: CompareOptions
    entries: tuple[Entry, ...] = ()
    location: str = ""  # of the assertion, as "path:line"
    error: str = ""  # why they cannot be compared


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One item that is not the same on all ranks.

    Attributes:
        path: Of the item.
        entries: By rank; None where it holds nothing.
        reference: The first rank that holds what most ranks hold.
        odd: The ranks that hold something else; empty where all hold the same NaN.
        distances: By rank, the greatest difference from the reference, and a text, which is empty where values are near
            enough; nothing where it was not measured.
    """

    path: str
    entries: Mapping[int, Entry | None]
    reference: int
    odd: tuple[int, ...]
    distances: Mapping[int, tuple[float, str]] = field(default_factory=dict)

    @property
    def measurable(self) -> bool:
        """Only values of tensors differ, so that they can be measured against each other."""
        kinds = {entry and (entry.kind, entry.attributes) for entry in self.entries.values()}
        return bool(self.odd) and len(kinds) == 1 and self.held[0].kind == "tensor"

    @property
    def held(self) -> list[Entry]:
        """What ranks hold, of those that hold something."""
        return [entry for entry in self.entries.values() if entry is not None]

    @property
    def far(self) -> tuple[int, ...]:
        """The ranks that differ by more than they may."""
        return tuple(rank for rank, (_, text) in self.distances.items() if text) if self.distances else self.odd


def usage_error(by_rank: Mapping[int, RankValues]) -> str:
    """Why nothing can be compared, the same on every rank; empty where it can be."""
    if error := first_error({rank: values.error for rank, values in by_rank.items()}):
        return error
    options = {rank: values.options for rank, values in by_rank.items()}
    if len({*options.values()}) == 1:
        return ""
    return f"the ranks compare in different ways: {_on_ranks(options)}; give the same options on every rank"


def first_error(errors: Mapping[int, str]) -> str:
    """The first of the ranks' errors, with the ranks that have one unless all have."""
    failed = [rank for rank, error in errors.items() if error]
    where = "" if len(failed) in (0, len(errors)) else f" ({format_ranks(failed)})"
    return f"{next(filter(None, errors.values()), '')}{where}"


def holds_nothing(values: RankValues) -> bool:
    """There is no tensor, number or text at all, so that a comparison would always pass."""
    return all(entry.value == "None" for entry in values.entries if entry.kind in _TITLES)


def differences(by_rank: Mapping[int, RankValues]) -> list[Mismatch]:
    """The items that are not the same on all ranks, in order; with a tolerance, also those that may be near enough."""
    options = next(iter(by_rank.values())).options
    held = {rank: {entry.path: entry for entry in values.entries} for rank, values in by_rank.items()}
    found = []
    for path in dict.fromkeys(path for entries in held.values() for path in entries):
        entries = {rank: of_rank.get(path) for rank, of_rank in held.items()}
        keys = {rank: entry and entry.key for rank, entry in entries.items()}
        common = Counter(keys.values()).most_common(1)[0][0]
        reference = next(rank for rank, key in keys.items() if key == common)
        odd = tuple(rank for rank, key in keys.items() if key != common)
        nans = not options.equal_nan and any(entry and entry.nans for entry in entries.values())
        if (odd or nans) and not _numbers_are_close(entries, reference, options):
            found.append(Mismatch(path, entries, reference, odd))
    return found


def _numbers_are_close(entries: Mapping[int, Entry | None], reference: int, options: CompareOptions) -> bool:
    """The items are numbers of one type, within the tolerance of one of them."""
    values = {rank: entry.value for rank, entry in entries.items() if entry and entry.kind == "number"}
    if len(values) < len(entries) or len({*map(type, values.values())}) > 1 or isinstance(values[reference], bool):
        return False
    want = values[reference]

    def is_close(got: Any) -> bool:
        if got == want or (options.equal_nan and got != got and want != want):
            return True
        distance = abs(got - want)
        return bool(distance <= options.atol + options.rtol * abs(want) and math.isfinite(distance))

    return all(map(is_close, values.values()))


def mismatch_message(found: Iterable[Mismatch], by_rank: Mapping[int, RankValues], name: str = "") -> str:
    """The message of the assertion on what `differences` found; empty where nothing differs by more than it may.

    `name` is the user's for the argument.
    """
    real = [item for item in found if item.far or not item.distances]
    if not real:
        return ""
    first, others = real[0], real[1:]
    lines = _details(first, "equal" if next(iter(by_rank.values())).options.exact else "close")
    if spelled_path := _spelled_path(first, name):
        lines += ["", f"The failure occurred for item {spelled_path}"]
    if others:
        lines.append(f"{len(others)} more {plural_verb('item is', 'items are', others)} not the same on all ranks:")
        lines += [f"  {_spelled_path(other, name)}: {_in_short(other)}" for other in others[:_MOST_ITEMS]]
        lines += [f"  and {len(others) - _MOST_ITEMS} more"] if len(others) > _MOST_ITEMS else []
    locations = {rank: values.location for rank, values in by_rank.items()}
    if len({*locations.values()}) > 1:
        lines.append(f"The ranks did not ask at the same line: {_on_ranks(locations)}")
    return "\n".join(lines)


def _details(item: Mismatch, how: str) -> list[str]:
    """One item that differs, at length."""
    kinds = {entry.kind for entry in item.held}
    if None in item.entries.values() or len(kinds) > 1 or not kinds <= _TITLES.keys():
        what = "Not every rank holds it" if None in item.entries.values() else "The ranks hold different things"
        spelled = _on_ranks({rank: entry or "nothing" for rank, entry in item.entries.items()})
        return ["Items are not the same on all ranks!", "", f"{what}: {spelled}."]
    kind, lines = item.held[0].kind, []
    if kind != "tensor":
        lines = [f"{_on_ranks(item.entries)}."]
    elif not item.odd:
        lines = [f"On every rank, {item.held[0].nans}."]
    elif item.measurable:
        same = [rank for rank in item.entries if rank not in item.far]
        verb = plural_verb("differs", "differ", item.far)
        lines = [f"{capitalized(format_ranks(item.far))} {verb} from {format_ranks(same)}.", *_numbers(item)]
    else:
        for number, (name, _) in enumerate(item.held[0].attributes):
            values = {rank: entry.attributes[number][1] for rank, entry in item.entries.items() if entry}
            if len({*values.values()}) > 1:
                lines.append(f"The values for attribute '{name}' do not match: {_on_ranks(values)}.")
    return [f"{_TITLES[kind]} are not {how} on all ranks!", "", *lines, *([] if item.odd else [_NAN_ADVICE])]


def _numbers(item: Mismatch) -> list[str]:
    """How far values differ, the ranks with the greatest differences first."""
    worst_first = sorted(item.far if item.distances else (), key=lambda rank: -item.distances[rank][0])
    groups = list(group_by(worst_first, lambda rank: item.distances[rank][1]).items())
    lines = [
        f"{line} on {format_ranks(ranks)} against rank {item.reference}"
        for text, ranks in groups[:_MOST_GROUPS]
        for line in text.splitlines()
    ]
    more = [rank for _, ranks in groups[_MOST_GROUPS:] for rank in ranks]
    lines += [f"Less far apart: {format_ranks(more)}"] if more else []
    nans = {rank: entry.nans or "no element is NaN" for rank, entry in item.entries.items() if entry}
    return [*lines, f"NaN: {_on_ranks(nans)}"] if len({*nans.values()}) > 1 else lines


def _in_short(item: Mismatch) -> str:
    if None in item.entries.values():
        return f"only on {format_ranks(rank for rank, entry in item.entries.items() if entry)}"
    what = "values" if item.measurable else "what it is"
    return f"{what}, on {format_ranks(item.far)}" if item.odd else "NaN on every rank"


def _spelled_path(item: Mismatch, name: str) -> str:
    return f"{name}{item.path}" if name or item.path.startswith("[") else item.path.removeprefix(".")


def _on_ranks(values: Mapping[int, object]) -> str:
    """The values of all ranks, equal ones together: "a on rank 0; b on ranks 1 and 2"."""
    groups: Mapping[str, Sequence[int]] = group_by(values, lambda rank: str(values[rank]))
    return "; ".join(f"{text} on {format_ranks(ranks)}" for text, ranks in groups.items())
