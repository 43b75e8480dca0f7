"""Who waits for whom by what recorders hold, on calls made by hand: each cause, and the ranks that it is told of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpcheck.findings.evidence.endings import RankDump, RecordedCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding
from ddpcheck.rules.collectives.diagnose import judge_waits
from ddpcheck.trace.wait_graph import WaitGraph
from tests.reports import assert_says

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
    ranks = [behind, *[[at(WORLD, 8), at(WORLD, 9)]] * 3]
    words = "of ranks (0,) ... The device stopped on rank 0 ... number 7; ranks 1 to 3 completed 7"
    assert_says(judged(*ranks), words)
    assert_says(judged(*ranks, gloo=True), ": Rank 0 stopped")


def entered(created: float) -> list[RecordedCall]:
    return [at(WORLD, 1, created=created, timeout=600.0)]


IN_WORLD, IN_RIGHT = [at(WORLD, 1)], [at(RIGHT, 5)]
ORDERED, SWAPPED = [at(LEFT, 1), at(WORLD, 1)], [at(WORLD, 1), at(LEFT, 1)]
LEFT_FIRST = "rank 0 waits for rank 1 in all_reduce(), number 1 of process group left"
DONE = [at(WORLD, 1, ended=True)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [entered(created) for created in (1000.0, 1001.0, 1400.0, 1002.0)],
            "of ranks (2,) ... came 400 s late to all_reduce(), number 1 (timeout: 600 s)",
        ),
        ([entered(created) for created in (1000.0, 1001.0, 1200.0, 1002.0)], ""),
        ([ORDERED, SWAPPED, IN_WORLD, IN_WORLD], f"of ranks (0, 1) ... same order ... | {LEFT_FIRST} |"),
        ([[to(1)], [to(2)], [to(3)], [to(0)]], "of ranks (0, 1, 2, 3) ... batch_isend_irecv"),
        (
            [IN_WORLD, IN_WORLD, IN_RIGHT, IN_RIGHT],
            "of ranks (2, 3) ... which does not end, and the other 2 ranks wait",
        ),
        ([IN_WORLD] * 4, ""),
        ([IN_WORLD, None, IN_WORLD, IN_WORLD], "of ranks (1,) ... left no dump"),
        ([IN_WORLD, None, IN_WORLD, []], "of ranks (3,)"),  # another cause
        ([[*DONE, at(WORLD, 2, ended=True)], DONE, DONE, DONE], ""),  # only behind
        ([[to(1)], [to(0)], [], []], ""),
    ],
)
def test_the_ranks_for_which_the_others_wait(ranks: Sequence[Sequence[RecordedCall] | None], words: str) -> None:
    assert_says(judged(*ranks), words)
