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
    waited_for = [thread for thread in ended if thread.waits_in and not follows_from_another_rank(thread.failure)]
    if not waited_for:
        return []
    first, *_ = threads = next(iter(group_by(waited_for, lambda t: (t.failure.location, t.waits_in)).values()))
    ranks = sorted({thread.failure.rank for thread in threads})
    others = [f"rank {f.rank}: {describe_failure(f)}" for f in failures if f.rank not in ranks]
    waits = f", and the main thread waits for another thread in {first.waits_in}"
    return _of_thread(first, ranks, unless_all(ranks, world_size), waits, others)


def judge_left_by_thread(ended: Sequence[EndedThread], story: Finding) -> list[Finding]:
    """DDP401: divergence at a line where an exception ended a thread of the rank."""
    for t in ended:
        lines = {t.failure.location, *program_lines(t.failure.traceback)}
        if t.failure.rank in story.ranks and str(story.location) in lines and not follows_from_another_rank(t.failure):
            return _of_thread(t, [t.failure.rank], story.ranks, "", [story.message, *story.evidence])
    return []


def _of_thread(
    thread: EndedThread, raised: Sequence[int], ranks: Sequence[int], suffix: str, evidence: Sequence[str]
) -> list[Finding]:
    outcome, where = phrase(thread.failure).rstrip("."), thread.failure.location
    return one_finding(
        "DDP401",
        ("thread",),
        f"{format_ranks(raised).capitalize()} {outcome}{f', at {where}' if where else ''}, which has ended a thread "
        f"({thread.name}){suffix}.",
        severity=Severity.ERROR,
        ranks=ranks,
        location=Location.parse(where or thread.waits_in.rpartition(" ")[2]),
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
            sequences = [[_key(call) for call in log if _kind(call) == kind] for log in logs]
            if any(sequence != max(sequences, key=len)[: len(sequence)] for sequence in sequences):
                break  # calls of this thread differ between ranks
        else:
            last = next((tuple(by_rank[rank.rank]) for rank in ranks if rank.in_threads), ())
            index, mismatch = first_mismatch(logs) or (0, last)
            calls = [call for call in mismatch if call is not None]
            # last call of each kind of thread, then the last two calls
            pair = [call for after, call in enumerate(calls, 1) if _kind(call) not in map(_kind, calls[after:])][-2:]
            if len(pair) == 2 and all({_key(call) for call in log[index:]} >= set(map(_key, pair)) for log in logs):
                return _of_interleaving(ranks, *sorted(pair, key=lambda call: call.thread))
    return []


def _kind(call: Call) -> str:
    """Return the thread name without numbers, which may differ between ranks."""
    return re.sub(r"[\d_-]+$|\d+", "", call.thread)


def _key(call: Call) -> tuple[str, str, str]:
    return _kind(call), call.operation, call.payload


def _of_interleaving(ranks: Sequence[RankAtEnd], call: Call, rival: Call) -> list[Finding]:
    return one_finding(
        "DDP403",
        sorted({call.operation, rival.operation}),
        f"A thread ({_kind(rival)}) calls {described_call(rival)} in {rival.group_words or 'a process group'} in which "
        f"{f'a thread ({_kind(call)})' if call.thread else 'the main thread'} calls {described_call(call)}: nothing "
        "orders the two, and the order differs between ranks.",
        location=Location.parse(rival.location),
        evidence=[f"rank {rank.rank}: {rank.doing}" for rank in ranks],
        fix=f"Give the code that calls {described_call(rival)} its own process group, created on every rank by "
        "new_group() before: async_save takes it as process_group. Or wait for the thread before the next collective "
        "of this group.",
    )


def told_of_threads(ended: Sequence[EndedThread]) -> list[str]:
    """Return evidence: exceptions that ended threads before ranks failed."""
    return [
        f"before that, rank {thread.failure.rank} {phrase(thread.failure)} in a thread ({thread.name})"
        f"{f' at {thread.failure.location}' if thread.failure.location else ''}"
        for thread in ended
        if not follows_from_another_rank(thread.failure)
    ]
