"""The collectives of the ranks as a report holds them: around the point where ranks part, and who waits for whom."""

from __future__ import annotations

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.rules.collectives.timelines import make_timelines, timelines_of_failure
from ddpcheck.trace.failures import FailureFacts


def logs_of(*programs: str, group: str = "0") -> list[list[Call]]:
    """Each letter is a barrier, and the line that calls it."""
    members = tuple(range(len(programs)))
    return [[Call("barrier", group, members, location=f"train.py:{ord(one)}") for one in p] for p in programs]


def waits(timeline: CollectiveTimeline) -> dict[int, tuple[int, ...]]:
    return {one.rank: one.waits_for for one in timeline.ranks if one.waits_for}


def called(timeline: CollectiveTimeline, rank: int) -> str:
    return "".join(chr(int(timeline.calls[at].location[9:])) for at in timeline.ranks[rank].calls)


def test_ranks_that_wait_name_those_that_never_came() -> None:
    (timeline,) = make_timelines(logs_of("AAB", "AAB", "AA", "AA"), {("0", 0), ("0", 1)}, {2: "at work"}, at_work={3})
    assert (timeline.parts_at, waits(timeline)) == (2, {0: (2, 3), 1: (2, 3)})
    assert [one.at_end for one in timeline.ranks] == ["", "", "at work", ""]
    assert len(timeline.calls) == 2 and called(timeline, 0) == "AAB"


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    logs = [[Call(operation, "0", (0, 1))] for operation in ("all_reduce", "broadcast")]
    (timeline,) = make_timelines(logs, {("0", 0), ("0", 1)})
    assert timeline.parts_at == 0 and waits(timeline) == {0: (1,), 1: (0,)}


def test_the_call_in_addition_is_where_ranks_part_and_groups_in_which_they_part_come_first() -> None:
    (timeline,) = make_timelines(logs_of("AAxE", "AAE"))
    assert timeline.parts_at == 2
    assert all(timeline.parts_at is None for timeline in make_timelines(logs_of("AB", "AB")))
    logs = [[*a, *b] for a, b in zip(logs_of("AA", "AA"), logs_of("AB", "A", group="z"), strict=True)]
    assert [timeline.group for timeline in make_timelines(logs)] == ["z", "0"]


def test_long_logs_keep_what_is_around_the_parting() -> None:
    (timeline,) = make_timelines(logs_of("A" * 500 + "B" * 500, "A" * 500), {("0", 0)}, first={"0": 7})
    first = timeline.ranks[0]
    assert timeline.parts_at == 507 and first.first <= 500 and first.first + len(first.calls) > 507
    assert len(first.calls) == 60 and first.later > 400 and first.waiting


def test_ranks_that_failed_in_step_have_none() -> None:
    failed = [RankFailure(rank, "raised", f"rank {rank} raised E", 0.0) for rank in (0, 1)]
    assert timelines_of_failure(FailureFacts(failed, logs_of("AB", "AB"))) == ()


def test_a_failed_world_says_what_each_rank_did() -> None:
    stuck = RankFailure(0, "stuck", "rank 0 did not finish", 0.0, collective="barrier() at train.py:66")
    failed = [RankFailure(1, "raised", "rank 1 raised ValueError: no", 0.0), stuck]
    (timeline,) = timelines_of_failure(FailureFacts(failed, logs_of("AB", "A", "AB"), [2]))
    ends = ["waits in barrier() at train.py:66", "raised ValueError: no", "had finished"]
    assert [rank.at_end for rank in timeline.ranks] == ends
    assert waits(timeline) == {0: (1,)}
