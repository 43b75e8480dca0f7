"""Whether all ranks hold the same values: from what each rank says of its own to the message of an assertion.

Pure functions on plain data; what a rank says of its tensors is gathered in `replica_values_on_rank`. The wording is
that of `torch.testing.assert_close`.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpcheck.findings.wording import format_ranks, plural_verb

_MOST_ITEMS = 8  # that are named after the first one that differs
_MOST_RANKS = 4  # whose numbers are given one by one
_NAN_ADVICE = "NaN does not equal NaN; pass equal_nan=True where it is meant."


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
        """Whether there is no tolerance."""
        return self.rtol == 0.0 and self.atol == 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One item that a rank holds: a tensor, a number, another plain value, or a container that counts its items.

    Attributes:
        path: How it is reached from the argument, as Python spells it; empty for the argument itself.
        kind: "tensor", "number", "value", or what sort of container it is.
        dtype: Of a tensor.
        shape: Likewise.
        layout: Likewise.
        device: Its type, likewise.
        stride: Likewise, where it is dense.
        value: A number, the text of a plain value, or how many items a container has.
        fingerprint: Of the tensor's values.
        nans: How many of them are NaN.
        first_nan: Index of the first one.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    layout: str = ""
    device: str = ""
    stride: tuple[int, ...] = ()
    value: Any = None
    fingerprint: int = 0
    nans: int = 0
    first_nan: tuple[int, ...] = ()

    def key(self, options: CompareOptions) -> Hashable:
        """What must be the same on every rank."""
        device = self.device if options.check_device else ""
        stride = self.stride if options.check_stride else ()
        value = repr(self.value)  # 1, 1.0 and True are three things, and a NaN is one
        return (self.kind, self.dtype, self.shape, self.layout, device, stride, value, self.fingerprint)

    def described(self) -> str:
        """What it is, in words."""
        if self.kind == "tensor":
            return f"a tensor of shape {self.shape} and dtype {self.dtype}"
        if self.kind in ("number", "value"):
            return str(self.value)
        return f"a {self.kind} of {self.value} item{'' if self.value == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class RankValues:
    """What one rank says of what it holds.

    Attributes:
        options: How it was asked to compare.
        leaves: In order.
        place: The line that asked, as "path:line".
        trouble: Why it cannot be compared; empty where it can.
    """

    options: CompareOptions
    leaves: tuple[Entry, ...] = ()
    place: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How the values of one tensor on one rank differ from those on the rank that they are measured against.

    Attributes:
        elements: How many there are.
        mismatched: How many of them differ.
        nans: How many of those are NaN on one of the two.
        first: Index of the first one that differs.
        absolute: The greatest absolute difference, of those that are no NaN.
        at: Its index.
        got: The value there.
        want: The value on the other rank.
        relative: The greatest difference relative to the other rank's value.
        relative_at: Its index.
        trouble: Why nothing could be measured.
    """

    elements: int = 0
    mismatched: int = 0
    nans: int = 0
    first: tuple[int, ...] = ()
    absolute: float | int = -1.0
    at: tuple[int, ...] = ()
    got: Any = None
    want: Any = None
    relative: float = -1.0
    relative_at: tuple[int, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One item that is not the same on all ranks.

    Attributes:
        path: Which.
        leaves: What each rank holds there; None where it holds nothing.
        against: Position of the first rank that holds what most ranks hold.
        odd: Positions of those that hold something else.
        measurable: Whether only values differ, so that they can be measured against each other.
    """

    path: str
    leaves: tuple[Entry | None, ...]
    against: int
    odd: tuple[int, ...]
    measurable: bool


def trouble_of(accounts: Sequence[RankValues], ranks: Sequence[int]) -> str:
    """Why nothing can be said: wrong use, told alike on every rank; empty where all is well."""
    said = {rank: account.trouble for rank, account in zip(ranks, accounts, strict=True) if account.trouble}
    if said:
        where = "" if len(said) == len(accounts) else f" ({format_ranks(list(said))})"
        return f"{next(iter(said.values()))}{where}"
    options = [account.options for account in accounts]
    if len(set(options)) > 1:
        return f"the ranks compare in different ways: {_who(options, ranks)}; give the same options on every rank"
    return ""


def holds_nothing(account: RankValues) -> bool:
    """Whether there is no tensor, number or text at all, so that a comparison would pass whatever the ranks did."""
    return all(leaf.value == "None" for leaf in account.leaves if leaf.kind in ("tensor", "number", "value"))


def differences(accounts: Sequence[RankValues]) -> list[Mismatch]:
    """The items that are not the same on all ranks, in order; with a tolerance, also those that may be near enough."""
    options = accounts[0].options
    by_rank = [{leaf.path: leaf for leaf in account.leaves} for account in accounts]
    found = []
    for path in dict.fromkeys(path for leaves in by_rank for path in leaves):
        leaves = tuple(of_rank.get(path) for of_rank in by_rank)
        keys = [leaf and leaf.key(options) for leaf in leaves]
        nans = not options.equal_nan and any(leaf is not None and leaf.nans for leaf in leaves)
        common = Counter(keys).most_common(1)[0][0]
        against = keys.index(common)
        if (len(set(keys)) == 1 and not nans) or _numbers_are_close(leaves, against, options):
            continue
        odd = tuple(place for place, key in enumerate(keys) if key != common)
        alike = len({leaf and replace(leaf, fingerprint=0).key(options) for leaf in leaves}) == 1
        found.append(Mismatch(path, leaves, against, odd, alike and bool(odd)))
    return found


def _numbers_are_close(leaves: Sequence[Entry | None], against: int, options: CompareOptions) -> bool:
    """Whether the leaves are numbers within the tolerance of one of them."""
    if any(leaf is None or leaf.kind != "number" for leaf in leaves):
        return False
    values = [leaf.value for leaf in leaves if leaf is not None]
    want = values[against]
    if any(type(value) is not type(want) or isinstance(value, bool) for value in values):
        return False
    return all(_is_close(value, want, options) for value in values)


def _is_close(got: Any, want: Any, options: CompareOptions) -> bool:
    if got == want or (options.equal_nan and got != got and want != want):
        return True
    distance, room = abs(got - want), options.atol + options.rtol * abs(want)
    return bool(distance <= room and math.isfinite(distance))


def tell(
    found: Sequence[Mismatch],
    measured: Mapping[str, Sequence[ValueDiff | None]],
    accounts: Sequence[RankValues],
    ranks: Sequence[int],
    name: str = "",
) -> str:
    """The message of the assertion; empty where nothing differs by more than it may.

    Args:
        found: Of `differences`.
        measured: By path, what each rank has measured; None for ranks that hold the common values. An item of which
            only values differ, and that is not here, counts as different without numbers.
        accounts: Of all ranks.
        ranks: Their numbers.
        name: What the user calls it.
    """
    options = accounts[0].options
    real = [
        item
        for item in found
        if item.path not in measured or any(one and (one.mismatched or one.trouble) for one in measured[item.path])
    ]
    if not real:
        return ""
    first = real[0]
    lines = _told(first, measured.get(first.path), options, ranks)
    if spelled_path := _spelled_path(first, name):
        lines += ["", f"The failure occurred for item {spelled_path}"]
    others = [other for other in real if other is not first]
    if others:
        lines.append(f"{len(others)} more {plural_verb('item is', 'items are', others)} not the same on all ranks:")
        lines += [_in_a_line(other, measured.get(other.path), name, ranks) for other in others[:_MOST_ITEMS]]
        lines += [f"  and {len(others) - _MOST_ITEMS} more"] if len(others) > _MOST_ITEMS else []
    places = [account.place for account in accounts]
    if len(set(places)) > 1:
        lines.append(f"The ranks did not ask at the same line: {_who(places, ranks)}")
    return "\n".join(lines)


def _told(
    item: Mismatch, measured: Sequence[ValueDiff | None] | None, options: CompareOptions, ranks: Sequence[int]
) -> list[str]:
    """One item that differs, at length."""
    some = [leaf for leaf in item.leaves if leaf is not None]
    kinds = {leaf.kind for leaf in some}
    if len(some) < len(ranks):
        said = [leaf.described() if leaf else "nothing" for leaf in item.leaves]
        return ["Items are not the same on all ranks!", "", f"Not every rank holds it: {_who(said, ranks)}."]
    if len(kinds) > 1 or not kinds & {"tensor", "number", "value"}:
        said = [leaf.described() for leaf in some]
        return ["Items are not the same on all ranks!", "", f"The ranks hold different things: {_who(said, ranks)}."]
    how = "equal" if options.exact else "close"
    if kinds != {"tensor"}:
        what = "Scalars" if kinds == {"number"} else "Values"
        lines = [f"{what} are not {how} on all ranks!", "", f"{_who([leaf.value for leaf in some], ranks)}."]
        return lines if item.odd else [*lines, _NAN_ADVICE]
    attributes = ["shape", "dtype", "layout"]
    attributes += ["device"] * options.check_device + ["stride"] * options.check_stride
    differing = [a for a in attributes if len({getattr(leaf, a) for leaf in some}) > 1]
    lines = [f"Tensor-likes are not {how} on all ranks!", ""]
    for attribute in differing:
        values = [getattr(leaf, attribute) for leaf in some]
        lines.append(f"The values for attribute '{attribute}' do not match: {_who(values, ranks)}.")
    if differing:
        return lines
    if not item.odd:
        leaf = some[0]
        at = f", the first at index {leaf.first_nan}" if leaf.shape else ""
        share = f"{leaf.nans} / {math.prod(leaf.shape)} elements are NaN on every rank{at}"
        return [*lines, f"{share}.", _NAN_ADVICE]
    odd = _odd_ranks(item, measured, ranks)
    same = [rank for rank in ranks if rank not in odd]
    lines.append(f"{format_ranks(odd).capitalize()} {plural_verb('differs', 'differ', odd)} from {format_ranks(same)}.")
    return lines + (_numbers(measured, item, options, ranks) if measured else [])


def _odd_ranks(item: Mismatch, measured: Sequence[ValueDiff | None] | None, ranks: Sequence[int]) -> list[int]:
    """The ranks that differ by more than they may."""
    if measured is None:
        return [ranks[place] for place in item.odd]
    return [rank for rank, one in zip(ranks, measured, strict=True) if one and (one.mismatched or one.trouble)]


def _numbers(
    measured: Sequence[ValueDiff | None], item: Mismatch, options: CompareOptions, ranks: Sequence[int]
) -> list[str]:
    """How many elements differ, and which most."""
    those = {rank: one for rank, one in zip(ranks, measured, strict=True) if one and (one.mismatched or one.trouble)}
    trouble = {rank: one.trouble for rank, one in those.items() if one.trouble}
    if trouble:
        return [f"How far could not be measured on {format_ranks(list(trouble))}: {next(iter(trouble.values()))}"]
    counts = [
        f"{one.mismatched} / {one.elements} ({one.mismatched / one.elements:.1%}) on rank {rank}"
        for rank, one in list(those.items())[:_MOST_RANKS]
    ]
    more = f" and on {len(those) - _MOST_RANKS} more" if len(those) > _MOST_RANKS else ""
    lines = [f"Mismatched elements: {', '.join(counts)}{more}"]
    against = f"against rank {ranks[item.against]}"
    for title, index, allowed in (("absolute", "at", options.atol), ("relative", "relative_at", options.rtol)):
        by_rank: dict[int, Any] = {rank: getattr(one, title) for rank, one in those.items()}
        rank = max(by_rank, key=by_rank.__getitem__)
        worst, place = by_rank[rank], getattr(those[rank], index)
        if worst < 0:
            continue  # there is nothing but NaN
        line = f"Greatest {title} difference: {worst}{f' at index {place}' if place else ''} on rank {rank} {against}"
        line += f", {those[rank].got} instead of {those[rank].want}" if title == "absolute" else ""
        lines.append(line + ("" if options.exact else f" (up to {allowed} allowed)"))
    for rank, one in list(those.items())[:_MOST_RANKS]:
        if one.nans:
            at = f", the first mismatch at index {one.first}" if one.first else ""
            whose = f"on rank {rank} or on rank {ranks[item.against]}"
            lines.append(f"NaN: {one.nans} of the mismatched elements are NaN {whose}{at}")
    return lines


def _in_a_line(item: Mismatch, measured: Sequence[ValueDiff | None] | None, name: str, ranks: Sequence[int]) -> str:
    path = _spelled_path(item, name)
    if None in item.leaves:
        return (
            f"  {path}: only on {format_ranks([rank for rank, leaf in zip(ranks, item.leaves, strict=True) if leaf])}"
        )
    if not item.odd:
        return f"  {path}: NaN on every rank"
    what = "values" if item.measurable else "what it is"
    return f"  {path}: {what}, on {format_ranks(_odd_ranks(item, measured, ranks))}"


def _spelled_path(item: Mismatch, name: str) -> str:
    return f"{name}{item.path}" if name or item.path.startswith("[") else item.path.removeprefix(".")


def _who(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """The values of all ranks, equal ones together: "a on rank 0; b on ranks 1 and 2"."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(str(value), []).append(rank)
    return "; ".join(f"{text} on {format_ranks(of)}" for text, of in groups.items())
