"""DDP401 and 403: hangs caused by threads of a rank.

Either an exception ended a thread that the main thread waits for, or two threads use one process group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.stacks import program_lines
from ddpcheck.findings.wording import format_ranks, group_by, one_finding, phrase, unless_all
from ddpcheck.judge.endings.branch_endings import described_call
from ddpcheck.judge.endings.collective_order import first_mismatch
from ddpcheck.judge.endings.rank_failure import describe_failure, follows_from_another_rank


@dataclass(frozen=True, slots=True)
class EndedThread:
    """Thread, not the main thread, that ended with an exception."""

    name: str
    failure: RankFailure  # the exception, as a failure of the rank
    # call in which the main thread waits for a thread: "get() at train.py:25", or ""
    waits_in: str = ""


def judge_threads(ended: Sequence[EndedThread], failures: Sequence[RankFailure], world_size: int) -> list[Finding]:
    """DDP401: exception in a thread while the main thread waits for a thread."""
    waited_for = [one for one in ended if one.waits_in and not follows_from_another_rank(one.failure)]
    if not waited_for:
        return []
    first, *_ = alike = next(iter(group_by(waited_for, lambda one: (one.failure.location, one.waits_in)).values()))
    ranks = sorted({one.failure.rank for one in alike})
    others = [f"rank {one.rank}: {describe_failure(one)}" for one in failures if one.rank not in ranks]
    waits = f", and the main thread waits for another thread in {first.waits_in}"
    return _of_thread(first, ranks, unless_all(ranks, world_size), waits, others)


def judge_left_by_thread(ended: Sequence[EndedThread], story: Finding) -> list[Finding]:
    """DDP401: divergence at a line where an exception ended a thread of the rank."""
    for one in ended:
        at = {one.failure.location, *program_lines(one.failure.traceback)}
        if one.failure.rank in story.ranks and str(story.location) in at and not follows_from_another_rank(one.failure):
            return _of_thread(one, [one.failure.rank], story.ranks, "", [story.message, *story.evidence])
    return []


def _of_thread(
    one: EndedThread, raised: Sequence[int], ranks: Sequence[int], more: str, evidence: Sequence[str]
) -> list[Finding]:
    said, where = phrase(one.failure).rstrip("."), one.failure.location
    return one_finding(
        "DDP401",
        ("thread",),
        f"{format_ranks(raised).capitalize()} {said}{f', at {where}' if where else ''}, which has ended a thread "
        f"({one.name}){more}.",
        severity=Severity.ERROR,
        ranks=ranks,
        location=Location.parse(where or one.waits_in.rpartition(" ")[2]),
        evidence=evidence,
        fix=f"Fix the exception{f' at {where}' if where else ''}. Also pass the exception of a thread to the code that "
        "waits for it: concurrent.futures does (future.result() raises it again); Python only prints it.",
    )


def judge_interleaving(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP403: collectives of several threads in one process group, ordered differently on each rank.

    Each thread made the same calls on all ranks. Logs are in the order in which calls began. If the order is equal, two
    threads of a rank must still wait: an object collective is several collectives to the backend.
    """
    for group in sorted({call.group for rank in ranks for call in rank.calls if call.thread}):
        by_rank = {rank.rank: [call for call in rank.calls if call.group == group] for rank in ranks}
        logs = list(filter(None, by_rank.values()))
        for kind in {_kind(call) for log in logs for call in log}:
            made = [[_what(call) for call in log if _kind(call) == kind] for log in logs]
            if any(one != max(made, key=len)[: len(one)] for one in made):
                break  # calls of this thread differ between ranks
        else:
            last = next((tuple(by_rank[rank.rank]) for rank in ranks if rank.in_threads), ())
            at, of_ranks = first_mismatch(logs) or (0, last)
            calls = [call for call in of_ranks if call is not None]
            # last call of each kind of thread, then the last two calls
            two = [call for after, call in enumerate(calls, 1) if _kind(call) not in map(_kind, calls[after:])][-2:]
            if len(two) == 2 and all({_what(call) for call in log[at:]} >= set(map(_what, two)) for log in logs):
                return _of_interleaving(ranks, *sorted(two, key=lambda call: call.thread))
    return []


def _kind(call: Call) -> str:
    """Return the thread name without numbers, which may differ between ranks."""
    return re.sub(r"[\d_-]+$|\d+", "", call.thread)


def _what(call: Call) -> tuple[str, str, str]:
    return _kind(call), call.operation, call.payload


def _of_interleaving(ranks: Sequence[RankAtEnd], own: Call, other: Call) -> list[Finding]:
    return one_finding(
        "DDP403",
        sorted({own.operation, other.operation}),
        f"A thread ({_kind(other)}) calls {described_call(other)} in {other.group_words or 'a process group'} in which "
        f"{f'a thread ({_kind(own)})' if own.thread else 'the main thread'} calls {described_call(own)}: nothing "
        "orders the two, and the order differs between ranks.",
        location=Location.parse(other.location),
        evidence=[f"rank {rank.rank}: {rank.doing}" for rank in ranks],
        fix=f"Give the code that calls {described_call(other)} its own process group, created on every rank by "
        "new_group() before: async_save takes it as process_group. Or wait for the thread before the next collective "
        "of this group.",
    )


def told_of_threads(ended: Sequence[EndedThread]) -> list[str]:
    """Return evidence: exceptions that ended threads before ranks failed."""
    return [
        f"before that, rank {one.failure.rank} {phrase(one.failure)} in a thread ({one.name})"
        f"{f' at {one.failure.location}' if one.failure.location else ''}"
        for one in ended
        if not follows_from_another_rank(one.failure)
    ]
