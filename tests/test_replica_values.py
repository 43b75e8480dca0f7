"""Messages on what the ranks hold, from what each of them says: what is named, of which ranks, and in which order."""

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.testing.assertions.replica_values import (
    CompareOptions,
    Entry,
    RankValues,
    ValueDiff,
    differences,
    holds_nothing,
    tell,
    trouble_of,
)

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st


def leaves_of(draw_shape: tuple[int, ...], fingerprint: int) -> Entry:
    return Entry("", "tensor", "float32", draw_shape, "strided", "cpu", fingerprint=fingerprint)


LEAVES = st.builds(
    Entry,
    path=st.just(""),
    kind=st.just("tensor"),
    dtype=st.sampled_from(["float32", "float64"]),
    shape=st.sampled_from([(2,), (3, 4)]),
    layout=st.just("strided"),
    device=st.sampled_from(["cpu", "cuda"]),
    fingerprint=st.integers(0, 2),
) | st.builds(Entry, path=st.just(""), kind=st.just("number"), value=st.integers(0, 2) | st.booleans())


@st.composite
def worlds(draw: Any) -> list[RankValues]:
    """What two to five ranks say that they hold: a few items, mostly the same."""
    size, names = draw(st.integers(2, 5)), draw(st.lists(st.sampled_from("abcde"), unique=True, min_size=1))
    common = {name: draw(LEAVES) for name in names}
    accounts = []
    for _ in range(size):
        own = {name: draw(LEAVES) if draw(st.integers(0, 5)) == 0 else leaf for name, leaf in common.items()}
        own = {name: leaf for name, leaf in own.items() if draw(st.integers(0, 8)) > 0}
        accounts.append(
            RankValues(CompareOptions(), tuple(replace(leaf, path=f"[{name!r}]") for name, leaf in own.items()))
        )
    return accounts


@given(accounts=worlds(), offset=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_whatever_the_ranks_hold_the_message_names_the_items_and_the_ranks(accounts: Any, offset: int) -> None:
    ranks = [offset + place for place in range(len(accounts))]
    found = differences(accounts)
    message = tell(found, {}, accounts, ranks, "x")
    by_rank = [{leaf.path: leaf for leaf in account.leaves} for account in accounts]
    paths = dict.fromkeys(path for leaves in by_rank for path in leaves)
    expected = [path for path in paths if len({repr(leaves.get(path)) for leaves in by_rank}) > 1]
    assert [item.path for item in found] == expected
    assert bool(message) == bool(expected)
    for place, path in enumerate(expected):
        assert f"x{path}" in message
        item = found[place]
        common = [leaves.get(path) for leaves in by_rank]
        assert all(repr(common[odd]) != repr(common[item.against]) for odd in item.odd)
        assert 2 * len(item.odd) <= 2 * len(ranks) - 2, "somebody holds what most hold"
        most = max(sum(repr(one) == repr(other) for other in common) for one in common)
        assert len(item.odd) == len(ranks) - most
    if expected:
        for rank in (ranks[odd] for odd in found[0].odd):
            assert str(rank) in message or " to " in message


@given(
    mismatched=st.lists(st.integers(0, 12), min_size=2, max_size=6).filter(any),
    values=st.floats(allow_nan=False, allow_infinity=True),
)
@settings(deadline=None)
def test_numbers_are_told_of_the_ranks_on_which_elements_differ(mismatched: list[int], values: float) -> None:
    accounts = [
        RankValues(CompareOptions(1e-3, 1e-3), (leaves_of((3, 4), place),)) for place in range(len(mismatched) + 1)
    ]
    measured = [None] + [
        ValueDiff(
            12, count, 0, (0, 0), abs(values) if count else -1.0, (1, 2), values, 0.0, 1.0 if count else -1.0, (2, 3)
        )
        for count in mismatched
    ]
    message = tell(differences(accounts), {"": measured}, accounts, range(len(accounts)))
    first = next(place for place, count in enumerate(mismatched, 1) if count)
    assert f"{mismatched[first - 1]} / 12" in message and f"on rank {first}" in message
    assert "at index (1, 2)" in message and "(up to 0.001 allowed)" in message
    within = [place for place, count in enumerate(mismatched, 1) if not count]
    assert all(f"(0.0%) on rank {place}" not in message for place in within)
    nothing = [one and replace(one, mismatched=0) for one in measured]
    assert tell(differences(accounts), {"": nothing}, accounts, range(len(accounts))) == ""


def test_what_cannot_be_compared_comes_before_what_differs() -> None:
    accounts = [
        RankValues(CompareOptions(), (leaves_of((1,), 1),)),
        RankValues(CompareOptions(), trouble="it is no tensor"),
    ]
    assert trouble_of(accounts, [3, 5]) == "it is no tensor (rank 5)"
    assert trouble_of(accounts[:1] * 2, [3, 5]) == ""
    assert not holds_nothing(accounts[0]) and holds_nothing(
        RankValues(CompareOptions(), (Entry("", "value", value="None"),))
    )
