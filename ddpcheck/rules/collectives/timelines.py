"""Timelines of the last collectives, for reports on failures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import CalledCollective, CollectiveTimeline, RankCollectives
from ddpcheck.rules.collectives.first_divergence import judge_divergences, mismatch_number
from ddpcheck.trace.collectives import call_signature
from ddpcheck.trace.failures import FailureFacts, describe_failure

_CALLS_BEFORE = 20  # calls before the mismatch, or before the end of the shortest log
_LIMIT = 60  # calls per rank
_MOST_GROUPS = 8


def timelines_of_failure(facts: FailureFacts) -> tuple[CollectiveTimeline, ...]:
    """Return the timelines of ranks that failed or did not finish."""
    waiting = {failure.rank for failure in facts.stuck if failure.collective and facts.logs[failure.rank]}
    at_work = {failure.rank for failure in facts.stuck if not failure.collective}
    at_end = {failure.rank: describe_failure(failure) for failure in facts.failures}
    open_calls = {(facts.logs[rank][-1].group, rank) for rank in waiting}
    drawn = make_timelines(facts.logs, open_calls, at_end | dict.fromkeys(facts.finished, "had finished"), at_work)
    return drawn if facts.stuck else mismatched_timelines(drawn)


def mismatched_timelines(drawn: Sequence[CollectiveTimeline]) -> tuple[CollectiveTimeline, ...]:
    """Keep timelines with a mismatch or a waiting rank; equal logs explain no failure."""
    return tuple(t for t in drawn if t.parts_at is not None or any(rank.waits_for for rank in t.ranks))


def make_timelines(
    logs: Sequence[Sequence[Call]],
    waiting: Collection[tuple[str, int]] = (),
    at_end: Mapping[int, str] | None = None,
    at_work: Collection[int] = (),
    first: Mapping[str, int] | None = None,
) -> tuple[CollectiveTimeline, ...]:
    """Return one timeline per process group, mismatched groups first."""
    groups = {call.group: call.members for log in logs for call in log}
    drawn = []
    for group, members in sorted(groups.items()):
        group_logs = [[call for call in log if call.group == group] for log in logs]
        findings = judge_divergences(group_logs, at_work, first)
        parts_at = mismatch_number(findings[0]) if findings else None
        waiting_ranks = {rank for name, rank in waiting if name == group}
        member_logs = {rank: group_logs[rank] for rank in members if rank < len(logs)}
        drawn.append(_timeline(group, member_logs, waiting_ranks, (first or {}).get(group, 0), parts_at, at_end or {}))
    return tuple(sorted(drawn, key=lambda timeline: timeline.parts_at is None)[:_MOST_GROUPS])


def _timeline(
    group: str,
    logs: Mapping[int, Sequence[Call]],
    waiting: Collection[int],
    first: int,
    parts_at: int | None,
    at_end: Mapping[int, str],
) -> CollectiveTimeline:
    end = min(map(len, logs.values()), default=0) if parts_at is None else parts_at - first
    start = max(end - _CALLS_BEFORE, 0)
    table: dict[CalledCollective, int] = {}
    ranks = []
    for rank, log in logs.items():
        calls = [CalledCollective(call.operation, call.payload, call.location) for call in log[start : start + _LIMIT]]
        ranks.append(
            RankCollectives(
                rank,
                first + start,
                tuple(table.setdefault(call, len(table)) for call in calls),
                later=max(len(log) - start - _LIMIT, 0),
                waiting=rank in waiting,
                waits_for=_ranks_waited_for(rank, logs) if rank in waiting else (),
                at_end=at_end.get(rank, ""),
            )
        )
    return CollectiveTimeline(group, tuple(table), tuple(ranks), parts_at)


def _ranks_waited_for(rank: int, logs: Mapping[int, Sequence[Call]]) -> tuple[int, ...]:
    """Return ranks that have not reached `rank`'s last call, else ranks whose call differs."""
    index = len(logs[rank]) - 1
    absent = tuple(peer for peer, log in logs.items() if len(log) <= index)
    if absent:
        return absent
    return tuple(peer for peer, log in logs.items() if call_signature(log[index]) != call_signature(logs[rank][index]))
