"""Schedules of many ranks: which do not pair up, which wait in a circle, and how a report stays short."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.findings.evidence.endings import ScheduledCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.rules.collectives.first_divergence import judge_schedules
from tests.reports import assert_says, only


def call(*members: int, waits: bool = True, payload: str = "float32 of shape (1,)") -> ScheduledCall:
    group = "world" if len(members) > 2 else f"ranks {members}"
    line = f"train.py:{10 + members[-1]}"
    return ScheduledCall(Call("all_reduce", group, members, payload, location=line), waits=waits)


def judged(*ranks: list[ScheduledCall]):
    return judge_schedules({str(rank): calls for rank, calls in enumerate(ranks)}, [str(n) for n in range(len(ranks))])


def test_groups_that_two_ranks_come_to_in_another_order_are_a_circle() -> None:
    findings = judged([call(0, 1), call(0, 2)], [call(1, 2), call(0, 1)], [call(0, 2), call(1, 2)])
    words = ": Ranks wait for each other in different process groups: rank 0 in all_reduce("
    call_of_2 = "rank 2 in all_reduce(float32 of shape (1,)) at train.py:12 of ranks 0 and 2 for rank 0. |"
    assert_says(findings, f"DDP403 ... of ranks (0, 1, 2) ... {words} ... {call_of_2}")


def test_a_rank_behind_a_circle_is_no_part_of_it() -> None:
    ab, bc, world = call(0, 1), call(1, 2), call(0, 1, 2, 3)
    findings = judged([ab, world], [bc, ab, world], [world, bc], [world])
    assert_says(findings, "of ranks (0, 1, 2) ... | ranks 2 and 3 wait in")
    one_way, all_of_them = call(0, 1, waits=False), call(0, 1, 2, waits=False)  # what returns at once
    assert judged([one_way, all_of_them], [all_of_them, one_way], [all_of_them]) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_that_come_to_all_groups_in_one_order_never_wait_in_a_circle(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 7))
    pairs = st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True).map(sorted)
    order = [call(*pair) for pair in data.draw(st.lists(pairs, max_size=12))]
    assert judged(*([one for one in order if rank in one.call.members] for rank in range(size))) == []


def test_of_4096_ranks_with_three_lists_a_report_has_three_lines() -> None:
    ranks = tuple(range(4096))
    schedules = {n: [call(*ranks), call(*ranks, payload=f"float32 of shape ({n},)")] for n in "123"}
    finding = only(judge_schedules(schedules, ["1" if rank % 8 else "2" if rank else "3" for rank in ranks]))
    assert len(finding.evidence) == 3 and max(map(len, finding.evidence)) < 250
    assert "rank 0, collective number 1: all_reduce(float32 of shape (3,))" in finding.evidence[0]
    assert judge_schedules(schedules, ["1"] * len(ranks)) == []
