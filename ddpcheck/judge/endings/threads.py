"""DDP401: an exception has ended a thread for which the main thread of its rank waits, and so do the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.stacks import program_lines
from ddpcheck.findings.wording import format_ranks, group_by, one_finding, phrase, unless_all
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


def told_of_threads(ended: Sequence[EndedThread]) -> list[str]:
    """What has ended threads, as evidence of how ranks have failed after that."""
    return [
        f"before that, rank {one.failure.rank} {phrase(one.failure)} in a thread ({one.name})"
        f"{f' at {one.failure.location}' if one.failure.location else ''}"
        for one in ended
        if not follows_from_another_rank(one.failure)
    ]
