"""A rank that leaves out the last pass of a loop, and one that has left the loop before, from evidence made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.stream.entries import place_of_backward
from tests.rules.test_endings import MAIN, backward, call, judge, only


@pytest.mark.parametrize(
    ("numbers", "batches", "line", "words"),
    [
        ((1, 2, 4), (1, 2, 4), 8, "backward pass of batch 3"),
        ((1, 2, 3), (1, 2, 4), 5, "forward pass of batch 3"),
    ],
    ids=["after forward", "before forward"],
)
def test_a_batch_that_a_rank_skips(numbers: Sequence[int], batches: Sequence[int], line: int, words: str) -> None:
    rank_0 = [backward(n, n) for n in (1, 2, 3, 4)]
    rank_1 = [*map(backward, numbers, batches), call("|", 16)]
    finding = only(judge(rank_0, rank_1))
    assert (finding.code, finding.ranks, finding.location) == ("DDP508", (1,), Location("train.py", line))
    assert words in finding.message and f"(`continue` at train.py:{line})" in finding.message


def of_loader(batches: int, *, exhausted: bool) -> list[LoaderPass]:
    return [LoaderPass(0, 0, Location("train.py", 3), "Samples", batches=batches, exhausted=exhausted)]


@pytest.mark.parametrize(
    ("forwards", "line", "words"),
    [
        (3, 8, "the backward pass of batch 3"),
        (2, 5, "the forward pass of batch 3"),
        (0, 9, "the backward pass of batch 3"),
    ],
    ids=["after forward", "before forward", "unknown"],
)
def test_the_last_batch_that_a_rank_skips(forwards: int, line: int, words: str) -> None:
    """Rank 1 has had all three batches, and stands behind the loop: it has not left it earlier."""
    rank_1 = RankAtEnd(
        1,
        [backward(1, 1), backward(2, 2), call("|", 16)],
        doing="waits in barrier",
        lines=("train.py:16", f"train.py:{MAIN}"),
        passes=of_loader(3, exhausted=True),
        forwards={6: forwards} if forwards else {},
    )
    rank_0 = [backward(n, n) for n in (1, 2, 3)]
    finding = only(judge(rank_0, rank_1, passes={0: of_loader(3, exhausted=False)}))
    assert (finding.code, finding.ranks, finding.location) == ("DDP508", (1,), Location("train.py", line))
    assert f"Rank 1 skipped {words}" in finding.message and "Join" not in finding.what_to_do
    assert "rank 1: 3 batches" in finding.evidence


@pytest.mark.parametrize(("batches", "exhausted"), [(3, False), (2, False), (2, True)])
def test_a_loop_over_a_loader_that_a_rank_has_left(batches: int, exhausted: bool) -> None:
    """By its `break`, in the batch that the other one is in or before, or at the end of a shorter shard."""
    rank_1 = [backward(1, 1), backward(2, 2), call("|", 16)]
    both = {0: of_loader(3, exhausted=False), 1: of_loader(batches, exhausted=exhausted)}
    finding = only(judge([backward(n, n) for n in (1, 2, 3)], rank_1, passes=both))
    assert finding.code == "DDP405"


@pytest.mark.parametrize(("forwards", "code"), [(3, "DDP508"), (2, "DDP405")])
def test_the_last_pass_of_a_loop_without_a_loader(forwards: int, code: str) -> None:
    passes = [backward(n, line=77, at=74) for n in (1, 2, 3)]
    rank_1 = RankAtEnd(1, [*passes[:2], call("|", 78)], doing="waits", lines=("train.py:78",), forwards={74: forwards})
    finding = only(judge(passes, rank_1))
    assert (finding.code, finding.ranks) == (code, (1,))
    assert finding.location == Location("train.py", 76 if code == "DDP508" else 73)


def test_a_forward_pass_of_one_rank_over_another_loader_in_the_same_loop_is_no_skipped_batch() -> None:
    """A function goes through the data for training, on all ranks, and for evaluation, on rank 0 alone."""
    (trained,) = of_loader(1, exhausted=True)
    trained = replace(trained, number=1)
    evaluated = replace(trained, loader=1, number=0, exhausted=False)
    passed = [call("f", 6), backward(1, 1, epoch=1)]
    rank_1 = RankAtEnd(1, passed, doing="has run to its end", passes=[trained], ended=True)
    found = judge([*passed, call("f", 6)], rank_1, passes={0: [trained, evaluated]})
    assert [one.code for one in found] != ["DDP508"]
    found = judge([*passed, call("f", 6)], rank_1, passes={0: [replace(trained, exhausted=False)]})
    assert [one.code for one in found] == ["DDP508"]  # of the loader that both have gone through


@pytest.mark.parametrize("forwards", [{6: 3}, {}])
def test_what_one_rank_calls_before_the_loop_is_no_pass_of_it_that_was_skipped(forwards: dict[int, int]) -> None:
    """Both ranks have made all backward passes in the end; only one has made the first collective."""
    passes = [backward(n, n) for n in (1, 2, 3)]
    done = of_loader(3, exhausted=True)
    ranks = [
        RankAtEnd(rank, calls, doing="has run to its end", ended=True, passes=done, forwards=forwards)
        for rank, calls in enumerate(([call("c", 20), *passes], passes))
    ]
    finding = only(judge(*ranks))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 20))


def test_a_loop_that_a_rank_comes_to_later_is_none_that_it_has_left() -> None:
    passes = [backward(n, n) for n in (1, 2, 3)]
    rank_0 = RankAtEnd(0, [call("c", 20), *passes, call("|", 16)], doing="has run to its end", ended=True)
    rank_1 = RankAtEnd(1, [*passes, call("|", 16)], doing="has run to its end", ended=True)
    assert only(judge(rank_0, rank_1)).code == "DDP403"


def of_shards(number: int, batch: int) -> Call:
    taken = f"batch {batch} of pass 0 over loader 0"
    return call("s", 6, place=place_of_backward(number, Location("train.py", 6), 0, taken))


def test_a_batch_that_a_rank_skips_under_fully_shard() -> None:
    """The others wait in the gathering of their last forward pass, before its backward pass."""
    rank_0 = [of_shards(n, n) for n in (1, 2, 3, 4)]
    rank_1 = [of_shards(1, 1), of_shards(2, 2), of_shards(3, 4), call("|", 16)]
    finding = only(judge(rank_0, rank_1))
    assert (finding.code, finding.ranks, finding.location) == ("DDP508", (1,), Location("train.py", 5))
    assert "the forward pass of batch 3" in finding.message
    shorter = {0: of_loader(4, exhausted=False), 1: of_loader(3, exhausted=True)}
    finding = only(judge(rank_0, [*rank_0[:3], call("|", 16)], passes=shorter))
    assert (finding.code, finding.location) == ("DDP405", Location("train.py", 3))
    assert "Join" not in finding.what_to_do


@pytest.mark.parametrize(
    ("batches", "where"), [((2, 3), ("DDP508", 5)), ((1, 2), ("DDP405", 11))], ids=["skipped", "left"]
)
def test_a_rank_that_skips_and_then_meets_another_collective(batches: Sequence[int], where: tuple[str, int]) -> None:
    """Rank 0 is done with the loop, and in a function with an exit; rank 1 is in the forward pass of its last batch."""
    rank_0 = RankAtEnd(
        0,
        [call("r", 6), backward(1, batches[0]), call("r", 6), backward(2, batches[1]), call("|", 21, 13)],
        doing="waits in barrier",
        lines=("train.py:21", "train.py:13", f"train.py:{MAIN}"),
        passes=of_loader(4, exhausted=True),
        forwards={6: 2},
    )
    rank_1 = RankAtEnd(
        1,
        [call("r", 6), backward(1, 1), call("r", 6), backward(2, 2), call("r", 6)],
        doing="waits in all_reduce",
        lines=("train.py:6", f"train.py:{MAIN}"),
        passes=of_loader(3, exhausted=False),
        forwards={6: 3},
    )
    finding = only(judge(rank_0, rank_1))
    assert (finding.code, finding.location) == (where[0], Location("train.py", where[1]))
