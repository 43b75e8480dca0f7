"""Messages on what the ranks hold, from what each of them says: what is named, of which ranks, and in which order."""

from typing import Any

import pytest

from ddpcheck.findings.replace import replace
from ddpcheck.testing.assertions.messages import (
    ComparedItem,
    CompareOptions,
    RankValues,
    differences,
    has_nothing_to_compare,
    mismatch_message,
    usage_error,
)

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st


def tensor_entry(draw_shape: tuple[int, ...], fingerprint: int) -> ComparedItem:
    return ComparedItem(
        "", "tensor", attributes=(("shape", str(draw_shape)), ("dtype", "float32")), fingerprint=fingerprint
    )


ENTRIES = st.builds(
    ComparedItem,
    path=st.just(""),
    kind=st.just("tensor"),
    attributes=st.tuples(
        st.tuples(st.just("shape"), st.sampled_from(["(2,)", "(3, 4)"])),
        st.tuples(st.just("dtype"), st.sampled_from(["float32", "float64"])),
        st.tuples(st.just("device"), st.sampled_from(["cpu", "cuda"])),
    ),
    fingerprint=st.integers(0, 2),
) | st.builds(ComparedItem, path=st.just(""), kind=st.just("number"), value=st.integers(0, 2) | st.booleans())


@st.composite
def worlds(draw: Any) -> list[RankValues]:
    """What two to five ranks say that they hold: a few items, mostly the same."""
    size, names = draw(st.integers(2, 5)), draw(st.lists(st.sampled_from("abcde"), unique=True, min_size=1))
    common = {name: draw(ENTRIES) for name in names}
    accounts = []
    for _ in range(size):
        own = {name: draw(ENTRIES) if draw(st.integers(0, 5)) == 0 else leaf for name, leaf in common.items()}
        own = {name: leaf for name, leaf in own.items() if draw(st.integers(0, 8)) > 0}
        accounts.append(
            RankValues(CompareOptions(), tuple(replace(leaf, path=f"[{name!r}]") for name, leaf in own.items()))
        )
    return accounts


@given(accounts=worlds(), offset=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_whatever_the_ranks_hold_the_message_names_the_items_and_the_ranks(accounts: Any, offset: int) -> None:
    ranks = [offset + place for place in range(len(accounts))]
    values = dict(zip(ranks, accounts, strict=True))
    found = differences(values)
    message = mismatch_message(found, values, "x")
    by_rank = [{entry.path: entry for entry in account.entries} for account in accounts]
    paths = dict.fromkeys(path for entries in by_rank for path in entries)
    expected = [path for path in paths if len({repr(entries.get(path)) for entries in by_rank}) > 1]
    assert [item.path for item in found] == expected
    assert bool(message) == bool(expected)
    for place, path in enumerate(expected):
        assert f"x{path}" in message
        item = found[place]
        common = [entries.get(path) for entries in by_rank]
        assert common == list(item.entries.values())
        assert all(repr(item.entries[odd]) != repr(item.entries[item.reference]) for odd in item.differing_ranks)
        assert 2 * len(item.differing_ranks) <= 2 * len(ranks) - 2, "somebody holds what most hold"
        most = max(sum(repr(one) == repr(other) for other in common) for one in common)
        assert len(item.differing_ranks) == len(ranks) - most
    if expected:
        for rank in found[0].differing_ranks:
            assert str(rank) in message or " to " in message


def test_the_numbers_of_a_few_groups_of_ranks_are_given_and_the_others_named() -> None:
    accounts = {rank: RankValues(CompareOptions(), (tensor_entry((3, 4), rank),)) for rank in range(8)}
    measured = {rank: (float(rank), f"up to {rank}" if rank else "") for rank in range(8)}
    message = mismatch_message([replace(item, distances=measured) for item in differences(accounts)], accounts)
    assert "Ranks 1 to 7 differ from rank 0." in message
    assert "up to 4 on rank 4" in message and "up to 3" not in message and "Less far apart: ranks 1 to 3" in message


def test_what_cannot_be_compared_comes_before_what_differs() -> None:
    held, refused = RankValues(CompareOptions(), (tensor_entry((1,), 1),)), RankValues(CompareOptions(), error="why")
    assert usage_error({3: held, 5: refused}) == "why (rank 5)"
    assert usage_error({3: held, 5: held}) == ""
    assert not has_nothing_to_compare(held) and has_nothing_to_compare(
        RankValues(CompareOptions(), (ComparedItem("", "value", "None"),))
    )
