"""Ranks that take the same samples by right, since they compute together, judged on what they have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.report import Location
from ddpcheck.stream.entries import GroupUsed, PeerReceived, RankStarted
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.script_facts import ScriptFacts

LINE = Location("train.py", 30)
PAIRS = [(0, 1), (2, 3)]


def groups_of(
    *, replicas: int = 2, parts: bool = True, rows: bool = True, world_size: int = 4, others: Sequence[Any] = ()
) -> list[tuple[int, ...]]:
    """Of ranks of which each pair takes the same samples; of two all do. Each is given what `others` have of it."""
    ranks = []
    for rank in range(world_size):
        order = tuple(range(rank // 2, 64, 2))
        given = [
            LoaderPass(0, 0, LINE, indices=order, rows=order if rows else (rank,), trains=True, replicas=replicas),
            *(Inputs(0, step, (100 * step + (rank if parts else rank // 2),), LINE) for step in range(3)),
        ]
        entries: list[Entry] = [*given, *(one for numbers, one in others if rank in numbers)]
        ranks.append(RankTrace(RankStarted(rank, world_size, "gloo"), entries, []))
    facts = ScriptFacts(ranks, ended=True)
    split = facts.sample_groups
    theirs = [[rank.started.rank for rank in group] for group in facts.training_groups]
    assert not split or theirs == [*map(list, zip(*split, strict=True))]
    return split


def used(*members: int) -> tuple[Sequence[int], Entry]:
    return members, GroupUsed("row", members, LINE)


def met(rank: int, peer: int, *, training: bool = True) -> tuple[Sequence[int], Entry]:
    return (rank,), PeerReceived(peer, training)


WHOLE = used(0, 1, 2, 3)


def test_parts_of_samples_that_are_dealt_to_as_many_groups() -> None:
    assert groups_of() == PAIRS
    assert groups_of(parts=False) == []  # the local rank of two nodes, say
    assert groups_of(rows=False) == []  # each augments them for itself
    assert groups_of(replicas=4) == groups_of(replicas=0) == []


def test_activations_that_are_exchanged() -> None:
    both = [used(0, 1), used(2, 3)]
    assert groups_of(replicas=0, parts=False, others=both) == PAIRS
    assert groups_of(replicas=0, parts=False, others=both[:1]) == []
    assert groups_of(replicas=0, parts=False, others=[WHOLE]) == []  # statistics of all, or features
    assert groups_of(replicas=0, others=[met(0, 1), met(3, 2)]) == PAIRS
    assert groups_of(replicas=0, others=[met(0, 1), met(3, 1)]) == []
    assert groups_of(replicas=0, others=[met(0, 1, training=False), met(3, 2)]) == []


@pytest.mark.parametrize(
    ("parts", "others", "right"), [(True, [used(0, 1)], True), (True, [], False), (False, [used(0, 1)], False)]
)
def test_one_group_of_all_ranks_has_to_exchange_and_to_take_parts(parts: bool, others: Any, right: bool) -> None:
    assert groups_of(replicas=1, world_size=2, parts=parts, others=others) == ([(0, 1)] if right else [])
