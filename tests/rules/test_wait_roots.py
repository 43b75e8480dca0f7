"""Who waits for whom by what recorders hold, on calls made by hand: each cause, and the ranks that it is told of."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.endings import RankDump, RecordedCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding
from ddpcheck.rules.collectives.diagnose import judge_waits
from ddpcheck.trace.wait_graph import WaitGraph

WORLD = ("0", (0, 1, 2, 3))
LEFT, RIGHT = ("left", (0, 1)), ("right", (2, 3))


def at(group: tuple[str, tuple[int, ...]], number: int, *, ended: bool = False, **more: float) -> RecordedCall:
    name, _ = group
    return RecordedCall(name, number, Call("all_reduce", name, ()), ended, **more)  # type: ignore[arg-type]


def to(peer: int, *, ended: bool = False) -> RecordedCall:
    return RecordedCall("0", 1, Call("send", "0", ()), ended, between_two=True, peer=peer)


def judged(*ranks: Sequence[RecordedCall] | None, **more: bool) -> list[Finding]:
    dumps = {rank: RankDump(calls, **more) for rank, calls in enumerate(ranks) if calls is not None}  # type: ignore[arg-type]
    graph = WaitGraph(dumps, [WORLD, LEFT, RIGHT])
    return judge_waits(graph, (), dict.fromkeys(dumps, "is somewhere"), reports_missing_dumps=True)


def test_waits_lead_through_groups_and_sends_to_the_rank_that_stopped() -> None:
    (finding,) = judged([to(1)], [at(WORLD, 1)], [at(RIGHT, 1), at(WORLD, 1)], [])
    assert (finding.code, finding.ranks) == ("DDP402", (3,))
    assert finding.message == "Rank 3 stopped calling collectives, and the other 3 ranks wait for that."
    assert finding.evidence == (
        "rank 3 is somewhere",
        "rank 1 waits for rank 3 in all_reduce(), number 1",
        "rank 2 waits for rank 3 in all_reduce(), number 1 of process group right",
        "rank 0 waits for rank 1 in send or recv",
    )


def test_a_device_that_has_not_completed_what_its_peers_have() -> None:
    behind = [at(WORLD, 7), at(WORLD, 8)]
    (finding,) = judged(behind, *[[at(WORLD, 8), at(WORLD, 9)]] * 3)
    assert finding.ranks == (0,) and "The device stopped on rank 0" in finding.message
    assert "number 7; ranks 1 to 3 completed 7" in finding.evidence[0]
    assert judged(behind, *[[at(WORLD, 8), at(WORLD, 9)]] * 3, gloo=True)[0].message.startswith("Rank 0 stopped")


def test_a_rank_that_came_long_after_the_others() -> None:
    def entered(created: float) -> list[RecordedCall]:
        return [at(WORLD, 1, created=created, timeout=600.0)]

    (finding,) = judged(entered(1000.0), entered(1001.0), entered(1400.0), entered(1002.0))
    assert finding.ranks == (2,) and "came 400 s late to all_reduce(), number 1 (timeout: 600 s)" in finding.message
    assert judged(*map(entered, (1000.0, 1001.0, 1200.0, 1002.0))) == []


def test_ranks_that_enter_two_groups_in_another_order() -> None:
    ordered, swapped = [at(LEFT, 1), at(WORLD, 1)], [at(WORLD, 1), at(LEFT, 1)]
    (finding,) = judged(ordered, swapped, [at(WORLD, 1)], [at(WORLD, 1)])
    assert finding.ranks == (0, 1) and "same order" in finding.fix
    assert finding.evidence[0] == "rank 0 waits for rank 1 in all_reduce(), number 1 of process group left"


def test_sends_in_a_circle() -> None:
    (finding,) = judged([to(1)], [to(2)], [to(3)], [to(0)])
    assert finding.ranks == (0, 1, 2, 3) and "batch_isend_irecv" in finding.fix


def test_a_call_in_which_all_are_is_told_if_others_wait_for_them() -> None:
    stalled = [at(RIGHT, 5)]
    (finding,) = judged([at(WORLD, 1)], [at(WORLD, 1)], stalled, stalled)
    assert finding.ranks == (2, 3) and "which does not end, and the other 2 ranks wait" in finding.message
    assert judged(*[[at(WORLD, 1)]] * 4) == []


def test_a_rank_without_a_dump_is_a_cause_only_without_another() -> None:
    (finding,) = judged([at(WORLD, 1)], None, [at(WORLD, 1)], [at(WORLD, 1)])
    assert finding.ranks == (1,) and "left no dump" in finding.message
    (finding,) = judged([at(WORLD, 1)], None, [at(WORLD, 1)], [])
    assert finding.ranks == (3,)


def test_ranks_that_are_only_behind_wait_for_nobody() -> None:
    done = [at(WORLD, 1, ended=True)]
    assert judged([*done, at(WORLD, 2, ended=True)], done, done, done) == []
    assert judged([to(1)], [to(0)], [], []) == []
