"""A rank that leaves out the last pass of a loop, and one that has left the loop before, from evidence made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.stream.entries import place_of_backward
from tests.reports import only
from tests.rules.test_endings import assert_finding, at, at_end, backward, call, calls_of, epoch, judge, taken

BEHIND = call("|", 16)


@pytest.mark.parametrize(
    ("numbers", "line", "words"),
    [((1, 2, 4), 8, "backward pass of batch 3"), ((1, 2, 3), 5, "forward pass of batch 3")],
    ids=["after forward", "before forward"],
)
def test_a_batch_that_a_rank_skips(numbers: Sequence[int], line: int, words: str) -> None:
    finding = only(judge(epoch(4), [*map(backward, numbers, (1, 2, 4)), BEHIND]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP508", (1,), Location("train.py", line))
    assert words in finding.message and f"(`continue` at train.py:{line})" in finding.message


@pytest.mark.parametrize(
    ("forwards", "line", "words"),
    [
        ({6: 3}, 8, "the backward pass of batch 3"),
        ({6: 2}, 5, "the forward pass of batch 3"),
        ({}, 9, "the backward pass of batch 3"),
    ],
    ids=["after forward", "before forward", "unknown"],
)
def test_the_last_batch_that_a_rank_skips(forwards: dict[int, int], line: int, words: str) -> None:
    """Rank 1 has had all three batches, and stands behind the loop: it has not left it earlier."""
    rank_1 = RankAtEnd(
        1,
        [*epoch(2), BEHIND],
        doing="waits in barrier",
        lines=BEHIND.callers,
        passes=[taken(3, exhausted=True)],
        forwards=forwards,
    )
    finding = assert_finding(judge(epoch(3), rank_1, passes={0: [taken(3)]}), "DDP508", 1, Location("train.py", line))
    assert f"Rank 1 skipped {words}" in finding.message and "Join" not in finding.what_to_do
    assert "rank 1: 3 batches" in finding.evidence


@pytest.mark.parametrize(("batches", "exhausted"), [(3, False), (2, False), (2, True)])
def test_a_loop_over_a_loader_that_a_rank_has_left(batches: int, exhausted: bool) -> None:
    """By its `break`, in the batch that the other one is in or before, or at the end of a shorter shard."""
    both = {0: [taken(3)], 1: [taken(batches, exhausted=exhausted)]}
    assert only(judge(epoch(3), [*epoch(2), BEHIND], passes=both)).code == "DDP405"


@pytest.mark.parametrize(("forwards", "code", "text"), [(3, "DDP508", "continue"), (2, "DDP405", "for x")])
def test_the_last_pass_of_a_loop_without_a_loader(forwards: int, code: str, text: str) -> None:
    passes, calls = calls_of("generated 123 12|")
    lines, line = calls[-1].callers[:1], at("generated", "model(").line
    rank_1 = RankAtEnd(1, calls, doing="waits", lines=lines, forwards={line: forwards})
    assert_finding(judge(passes, rank_1), code, 1, at("generated", text))


def test_a_forward_pass_of_one_rank_over_another_loader_in_the_same_loop_is_no_skipped_batch() -> None:
    """A function goes through the data for training, on all ranks, and for evaluation, on rank 0 alone."""
    trained = taken(1, 1, exhausted=True)
    passed = [call("f", 6), backward(1, 1, epoch=1)]
    rank_0, rank_1 = [*passed, call("f", 6)], at_end(1, passed, passes=[trained])
    findings = judge(rank_0, rank_1, passes={0: [trained, replace(taken(1), loader=1)]})
    assert [finding.code for finding in findings] != ["DDP508"]
    assert only(judge(rank_0, rank_1, passes={0: [taken(1, 1)]})).code == "DDP508"  # both went through this loader


@pytest.mark.parametrize("forwards", [{6: 3}, {}])
def test_what_one_rank_calls_before_the_loop_is_no_pass_of_it_that_was_skipped(forwards: dict[int, int]) -> None:
    """Both ranks have made all backward passes in the end; only one has made the first collective."""
    ended = {"passes": [taken(3, exhausted=True)], "forwards": forwards}
    findings = judge(at_end(0, [call("c", 20), *epoch(3)], **ended), at_end(1, epoch(3), **ended))
    assert_finding(findings, "DDP403", 0, Location("train.py", 20))


def test_a_loop_that_a_rank_comes_to_later_is_none_that_it_has_left() -> None:
    calls = [*epoch(3), BEHIND]
    assert only(judge(at_end(0, [call("c", 20), *calls]), at_end(1, calls))).code == "DDP403"


def of_shards(number: int, batch: int) -> Call:
    place = place_of_backward(number, Location("train.py", 6), 0, f"batch {batch} of pass 0 over loader 0")
    return call("S", 6, place=place)


def test_a_batch_that_a_rank_skips_under_fully_shard() -> None:
    """The others wait in the gathering of their last forward pass, before its backward pass."""
    rank_0 = [of_shards(n, n) for n in (1, 2, 3, 4)]
    findings = judge(rank_0, [*rank_0[:2], of_shards(3, 4), BEHIND])
    finding = assert_finding(findings, "DDP508", 1, Location("train.py", 5))
    assert "the forward pass of batch 3" in finding.message
    finding = only(judge(rank_0, [*rank_0[:3], BEHIND], passes={0: [taken(4)], 1: [taken(3, exhausted=True)]}))
    assert (finding.code, finding.location) == ("DDP405", Location("train.py", 3))
    assert "Join" not in finding.what_to_do


@pytest.mark.parametrize(
    ("batches", "code", "line"), [((2, 3), "DDP508", 5), ((1, 2), "DDP405", 11)], ids=["skipped", "left"]
)
def test_a_rank_that_skips_and_then_meets_another_collective(batches: tuple[int, int], code: str, line: int) -> None:
    """Rank 0 is done with the loop, and in a function with an exit; rank 1 is in the forward pass of its last batch."""

    def rank(number: int, batches: tuple[int, int], last: Call, count: int, forwards: int) -> RankAtEnd:
        calls = [call("r", 6), backward(1, batches[0]), call("r", 6), backward(2, batches[1]), last]
        passes, doing = [taken(count, exhausted=count == 4)], f"waits in {last.operation}"
        return RankAtEnd(number, calls, doing=doing, lines=last.callers, passes=passes, forwards={6: forwards})

    finding = only(judge(rank(0, batches, call("|", 21, 13), 4, 2), rank(1, (1, 2), call("r", 6), 3, 3)))
    assert (finding.code, finding.location) == (code, Location("train.py", line))
