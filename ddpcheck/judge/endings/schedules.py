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


def judge_schedules(schedules: Mapping[str, Sequence[ScheduledCall]], of_ranks: Sequence[str]) -> list[Finding]:
    """Return mismatched collectives of the ranks, or else a circular wait."""
    calls = {name: [one.call for one in schedule] for name, schedule in schedules.items()}
    return judge_collectives([calls[name] for name in of_ranks]) or _judge_waits([schedules[name] for name in of_ranks])


def _judge_waits(ranks: Sequence[Sequence[ScheduledCall]]) -> list[Finding]:
    """Detect circular waits across process groups whose calls match."""
    stuck = dict(_run(ranks))
    if not stuck:
        return []
    circle = find_circle(stuck)
    told = [f"{format_ranks([rank])} in {_described(stuck[rank][0])} for {format_ranks([of])}" for rank, of in circle]
    waits = group_by(stuck, lambda rank: (_described(stuck[rank][0]), format_ranks(stuck[rank][1])))
    first = stuck[circle[0][0]][0]
    return one_finding(
        "DDP403",
        sorted({stuck[rank][0].operation for rank, _ in circle}),
        f"Ranks wait for each other in different process groups: {join_names(told, most=4)}.",
        ranks=tuple(sorted(rank for rank, _ in circle)),
        location=Location.parse(first.location),
        evidence=[
            f"{format_ranks(some)} {plural_verb('waits', 'wait', some)} in {call} for {missing}"
            for (call, missing), some in waits.items()
        ],
        fix=GROUP_ORDER,
    )


def _described(call: Call) -> str:
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


def _run(ranks: Sequence[Sequence[ScheduledCall]]) -> Iterator[tuple[int, tuple[Call, Sequence[int]]]]:
    """Simulate all ranks; yield each blocked rank with its call and the missing ranks."""
    places, numbers = [0] * len(ranks), [Counter[str]() for _ in ranks]
    arrived: dict[_Key, set[int]] = defaultdict(set)
    waiting: dict[_Key, list[int]] = defaultdict(list)
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        while places[rank] < len(ranks[rank]):
            one = ranks[rank][places[rank]]
            key = one.call.group, numbers[rank][one.call.group]
            arrived[key].add(rank)
            if one.waits and len(arrived[key]) < len(one.call.members):
                waiting[key].append(rank)
                break
            places[rank] += 1
            numbers[rank][one.call.group] += 1
            if len(arrived[key]) == len(one.call.members):
                ready += waiting.pop(key, ())
    for key, some in waiting.items():
        for rank in some:
            call = ranks[rank][places[rank]].call
            yield rank, (call, [member for member in call.members if member not in arrived[key]])
