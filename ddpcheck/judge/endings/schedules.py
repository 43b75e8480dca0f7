"""DDP403: collectives of simulated ranks that mismatch or deadlock across process groups."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.endings import ScheduledCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by, join_names, one_finding, plural_verb
from ddpcheck.judge.endings.collective_order import judge_collectives
from ddpcheck.judge.endings.stories import GROUP_ORDER

_Key = tuple[str, int]  # (process group, index of the collective in it)


def judge_schedules(schedules: Mapping[str, Sequence[ScheduledCall]], names: Sequence[str]) -> list[Finding]:
    """Return mismatched collectives of the ranks, or else a circular wait."""
    calls = {name: [scheduled.call for scheduled in schedule] for name, schedule in schedules.items()}
    return judge_collectives([calls[name] for name in names]) or _judge_waits([schedules[name] for name in names])


def _judge_waits(schedules: Sequence[Sequence[ScheduledCall]]) -> list[Finding]:
    """Detect circular waits across process groups whose calls match."""
    stuck = dict(_simulate(schedules))
    if not stuck:
        return []
    circle = find_circle(stuck)
    texts = [f"{format_ranks([rank])} in {_words(stuck[rank][0])} for {format_ranks([peer])}" for rank, peer in circle]
    waits = group_by(stuck, lambda rank: (_words(stuck[rank][0]), format_ranks(stuck[rank][1])))
    first = stuck[circle[0][0]][0]
    return one_finding(
        "DDP403",
        sorted({stuck[rank][0].operation for rank, _ in circle}),
        f"Ranks wait for each other in different process groups: {join_names(texts, most=4)}.",
        ranks=tuple(sorted(rank for rank, _ in circle)),
        location=Location.parse(first.location),
        evidence=[
            f"{format_ranks(ranks)} {plural_verb('waits', 'wait', ranks)} in {call} for {missing}"
            for (call, missing), ranks in waits.items()
        ],
        fix=GROUP_ORDER,
    )


def _words(call: Call) -> str:
    return f"{call} of {format_ranks(call.members)}"


def find_circle(stuck: Mapping[int, tuple[Call, Sequence[int]]]) -> list[tuple[int, int]]:
    """Return a circular wait as pairs (rank, rank waited for), or []."""
    path = list[int]()
    following = min(stuck, default=None)
    while following is not None and following not in path:
        path.append(following)
        following = next((rank for rank in stuck[path[-1]][1] if rank in stuck), None)
    circle = path[path.index(following) :] if following is not None else []
    return list(zip(circle, [*circle[1:], *circle[:1]], strict=True))


def _simulate(schedules: Sequence[Sequence[ScheduledCall]]) -> Iterator[tuple[int, tuple[Call, Sequence[int]]]]:
    """Simulate all ranks; yield each blocked rank with its call and the missing ranks."""
    places, numbers = [0] * len(schedules), [Counter[str]() for _ in schedules]
    arrived: dict[_Key, set[int]] = defaultdict(set)
    waiting: dict[_Key, list[int]] = defaultdict(list)
    ready = deque(range(len(schedules)))
    while ready:
        rank = ready.popleft()
        while places[rank] < len(schedules[rank]):
            scheduled = schedules[rank][places[rank]]
            key = scheduled.call.group, numbers[rank][scheduled.call.group]
            arrived[key].add(rank)
            if scheduled.waits and len(arrived[key]) < len(scheduled.call.members):
                waiting[key].append(rank)
                break
            places[rank] += 1
            numbers[rank][scheduled.call.group] += 1
            if len(arrived[key]) == len(scheduled.call.members):
                ready += waiting.pop(key, ())
    for key, blocked in waiting.items():
        for rank in blocked:
            call = schedules[rank][places[rank]].call
            yield rank, (call, [member for member in call.members if member not in arrived[key]])
