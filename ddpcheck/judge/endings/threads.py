"""DDP401 and 403: ranks that wait because of their threads.

An exception has ended one for which the main thread waits; or two threads of a rank use one process group.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.stacks import program_lines
from ddpcheck.findings.wording import format_ranks, group_by, one_finding, phrase, unless_all
from ddpcheck.judge.endings.branch_endings import described_call, named
from ddpcheck.judge.endings.rank_failure import describe_failure, follows_from_another_rank


@dataclass(frozen=True, slots=True)
class EndedThread:
    """A thread beside the main one that an exception has ended."""

    name: str
    failure: RankFailure  # the exception, as that of its rank
    # what the main thread waits in for another thread of its process: "get() at train.py:25"; "" where it does not
    waits_in: str = ""


def judge_threads(ended: Sequence[EndedThread], failures: Sequence[RankFailure], world_size: int) -> list[Finding]:
    """At most one finding: `failures` are of the ranks, none of which gets on."""
    waited_for = [one for one in ended if one.waits_in and not follows_from_another_rank(one.failure)]
    if not waited_for:
        return []
    first = waited_for[0]
    alike = group_by(waited_for, lambda one: (one.failure.location, one.waits_in))[
        first.failure.location, first.waits_in
    ]
    ranks = sorted({one.failure.rank for one in alike})
    others = [f"rank {one.rank}: {describe_failure(one)}" for one in failures if one.rank not in ranks]
    waits = f", and the main thread waits for another thread in {first.waits_in}"
    return _of_thread(first, ranks, unless_all(ranks, world_size), waits, others)


def judge_left_by_thread(ended: Sequence[EndedThread], story: Finding) -> list[Finding]:
    """Where a rank leaves something out, at a line at which an exception has left a thread: that is the cause."""
    for one in ended:
        at = {one.failure.location, *program_lines(one.failure.traceback)}
        if one.failure.rank in story.ranks and str(story.location) in at and not follows_from_another_rank(one.failure):
            return _of_thread(one, [one.failure.rank], story.ranks, "", [story.message, *story.evidence])
    return []


def _of_thread(
    one: EndedThread, told: Sequence[int], ranks: Sequence[int], more: str, evidence: Sequence[str]
) -> list[Finding]:
    said, where = phrase(one.failure).rstrip("."), one.failure.location
    return one_finding(
        "DDP401",
        ("thread",),
        f"{format_ranks(told).capitalize()} {said}{f', at {where}' if where else ''}, which has ended a thread "
        f"({one.name}){more}.",
        severity=Severity.ERROR,
        ranks=ranks,
        location=Location.parse(where or one.waits_in.rpartition(" ")[2]),
        evidence=evidence,
        fix=f"Mend what raises{f' at {where}' if where else ''}. And have a thread hand what it raises to who waits "
        "for it: concurrent.futures does (future.result() raises it again); Python only prints it.",
    )


def judge_interleaving(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP403: threads of a rank make collectives in one process group, which come in another order on each rank.

    Each thread by itself has called the same on all ranks, as far as each has come. The order in the logs is that in
    which calls began; where that is the same, it counts that two threads of a rank still wait, and all ranks have made
    the calls in which they do: a collective of objects is several to a backend.
    """
    for group in sorted({call.group for rank in ranks for call in rank.calls if call.thread}):
        logs = {rank.rank: [call for call in rank.calls if call.group == group] for rank in ranks}
        logs = {rank: log for rank, log in logs.items() if log}
        threads = {call.thread for log in logs.values() for call in log}
        made = [_made_by(_kind(thread), logs.values()) for thread in threads]
        if len(threads) < 2 or not all(_agree(one) for one in made):
            continue
        waiting = [rank.rank for rank in ranks if rank.in_threads and rank.rank in logs]
        all_came = all(len(set(map(len, one))) == 1 for one in made)
        if calls := _crossing(logs) or (_last_of_two(logs[waiting[0]]) if waiting and all_came else ()):
            return _of_interleaving(ranks, group, calls)
    return []


def _kind(thread: str) -> str:
    """The name of a thread without its numbers, which may differ between ranks."""
    return re.sub(r"\d+", "", thread)


def _what(call: Call) -> tuple[str, str, str]:
    return _kind(call.thread), call.operation, call.payload


def _made_by(kind: str, logs: Iterable[Sequence[Call]]) -> list[list[tuple[str, str, str]]]:
    """The calls of one thread on each rank; of the rank with the fewest first."""
    return sorted(([_what(call) for call in log if _kind(call.thread) == kind] for log in logs), key=len)


def _agree(made: Sequence[Sequence[tuple[str, str, str]]]) -> bool:
    """Whether these calls are the same, as far as each rank has come."""
    return all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(made))


def _crossing(logs: Mapping[int, Sequence[Call]]) -> tuple[Call, ...]:
    """Two calls of different threads that two ranks have both made, in another order."""
    first, *others = logs.values()
    for other in others:
        for at, (one, two) in enumerate(zip(first, other, strict=False)):
            if _what(one) != _what(two):
                later = [_what(call) for call in first[at:]], [_what(call) for call in other[at:]]
                if one.thread != two.thread and _what(two) in later[0] and _what(one) in later[1]:
                    return one, two
                break
    return ()


def _last_of_two(log: Sequence[Call]) -> tuple[Call, ...]:
    """The last call of a rank, and the last one of another thread of it."""
    other = next((call for call in reversed(log) if call.thread != log[-1].thread), None)
    return () if other is None else (other, log[-1])


def _of_interleaving(ranks: Sequence[RankAtEnd], group: str, calls: Sequence[Call]) -> list[Finding]:
    own, other = sorted(calls, key=lambda call: call.thread)  # that of the main thread first, if there is one
    of_thread = described_call(other)
    return one_finding(
        "DDP403",
        sorted({own.operation, other.operation}),
        f"A thread ({_kind(other.thread).strip('_- ')}) calls {of_thread} in {other.group_words or 'a process group'} "
        f"in which {f'a thread ({own.thread})' if own.thread else 'the main thread'} calls "
        f"{described_call(own)}: nothing orders the two, and each rank comes to them in an "
        "order of its own.",
        location=Location.parse(other.location),
        evidence=[
            *(f"rank {rank.rank}: {rank.doing}{_and_waits(rank)}" for rank in ranks),
            *(f"rank {rank.rank}, its last collectives there: {_last_words(rank, group)}" for rank in ranks),
        ],
        fix=f"Give what calls {of_thread} a process group of its own, which every rank makes by new_group() before: "
        "async_save takes it as process_group. Or wait for the thread before the next collective of this group.",
    )


def _and_waits(rank: RankAtEnd) -> str:
    return "".join(f", another thread in {call}" for call in rank.in_threads)


def _last_words(rank: RankAtEnd, group: str) -> str:
    calls = [call for call in rank.calls if call.group == group][-3:]
    return ", ".join(f"{named(call)} ({call.thread or 'main thread'})" for call in calls)


def told_of_threads(ended: Sequence[EndedThread]) -> list[str]:
    """What has ended threads, as evidence of how ranks have failed after that."""
    return [
        f"before that, rank {one.failure.rank} {phrase(one.failure)} in a thread ({one.name})"
        f"{f' at {one.failure.location}' if one.failure.location else ''}"
        for one in ended
        if not follows_from_another_rank(one.failure)
    ]
