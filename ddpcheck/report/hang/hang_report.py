"""The report on a job that hung: where its ranks part, and who waits where, by the dumps that it has left.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpcheck import __version__
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.findings.program_blocks import blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, Location, Report
from ddpcheck.findings.selection import Suppression, sort_out
from ddpcheck.findings.wording import counted, format_ranks, group_by, one_finding, plural_verb
from ddpcheck.judge.endings.call_sites import judge_partings
from ddpcheck.judge.endings.ending_facts import lines_of
from ddpcheck.judge.endings.endings import judge_endings
from ddpcheck.judge.endings.timelines import timelines
from ddpcheck.report.hang.dump_files import read_dumps
from ddpcheck.report.hang.flight_recorder import (
    DEFAULT_GROUP,
    Entry,
    GroupLogs,
    RankDump,
    line_up,
    world_size_of,
)

_MOST_TIMELINES = 8  # of process groups


def report_on_hang(
    folder: str,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    suppress: Sequence[Suppression] = (),
) -> Report:
    """The report on the dumps in a folder.

    Args:
        folder: With one dump a rank.
        select: Codes, prefixes or names of the rules to report; all where there are none.
        ignore: Those that are not reported.
        suppress: Findings that are shown with a reason, and do not count.

    Raises:
        UsageError: There are no dumps that can be read.
    """
    with _without_collector():
        dumps = read_dumps(Path(folder))
    groups = list(line_up(dumps))
    at_end = {rank: _wait(dump) for rank, dump in dumps.items()}
    findings = [finding for group in groups for finding in _judge(group, at_end)]
    chosen = sort_out(findings, folder, select=select, ignore=ignore, suppress=suppress)
    report = Report(
        target=folder,
        tool={"name": "ddpcheck", "version": __version__},
        world={"world_size": world_size_of(dumps)},
        checks=(_ranks(dumps), _collectives(dumps, groups, findings, chosen.kept), _call_sites(dumps)),
        timelines=tuple(timeline for group in groups for timeline in _timelines(group, at_end))[:_MOST_TIMELINES],
    )
    return chosen.complete(report).with_excerpts()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """No search for circles of objects in the block: what is read has none, and reading takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _judge(group: GroupLogs, at_end: Mapping[int, str]) -> list[Finding]:
    """DDP403 where the ranks of a group part; DDP402 where one waits alone in a group whose ranks are not known."""
    here = set(at_end)
    waits = [f"rank {rank}: {said}" for rank, said in at_end.items()]
    found = judge_partings(group.logs, _coming(group), {group.name: group.first})
    if not found and not group.are_known and len(group.members) == 1:
        (rank,) = group.members
        pairs = zip(group.logs[rank], group.ended[rank], strict=True)
        if call := next((call for call, ended in pairs if not ended), None):
            found = one_finding(
                "DDP402",
                (call.operation,),
                f"Rank {rank} waits in {call} of process group {group.name}, and no dump shows another rank in a "
                "collective of that group.",
                ranks=(rank,),
                location=Location.parse(call.location),
            )
    if found and (story := _story(group, at_end)):
        numbers = [f"by the collectives of the ranks: {one.message}" for one in found]
        found = [replace(one, evidence=(*one.evidence, *numbers), tags=found[0].tags) for one in story]
        waits = []  # is in the story
    missing = sorted(set(group.members) - here)
    unknown = [f"{format_ranks(missing)}: no dump"] if missing else []
    which = [f"process group {group.name}"] if group.name != DEFAULT_GROUP else []
    return [replace(one, evidence=(*which, *one.evidence, *waits, *unknown)) for one in found]


def _story(group: GroupLogs, at_end: Mapping[int, str]) -> list[Finding]:
    """What one rank of the group did and the others did not; by the program, too, where its files are here."""
    members = sorted(set(group.members) & set(at_end))
    ranks = [
        RankAtEnd(rank, [replace(call, members=tuple(members)) for call in log], group.first, at_end[rank])
        for rank, log in enumerate(group.logs)
        if rank in members
    ]
    lines = {line for rank in ranks for call in rank.calls for line in lines_of(call)}
    return judge_endings(ranks, blocks_of_lines(lines))


def _coming(group: GroupLogs) -> set[int]:
    """The ranks that may still come to what the others have called.

    A dump is of one moment, and that of another rank of another: what has ended, others have come to or will.
    """
    return {
        rank
        for rank, log in enumerate(group.logs)
        if all(all(ended[len(log) :]) for other, ended in enumerate(group.ended) if other != rank)
    }


def _timelines(group: GroupLogs, at_end: Mapping[int, str]) -> tuple[CollectiveTimeline, ...]:
    open_ones = {(group.name, rank) for rank, ended in enumerate(group.ended) if ended and not ended[-1]}
    return timelines(group.logs, open_ones, at_end, _coming(group), {group.name: group.first})


def _wait(dump: RankDump) -> str:
    """What a rank waits for, by its dump."""
    open_ones = [entry for entry in dump.entries if not entry.ended]
    if open_ones:
        more = f", and in {counted(len(open_ones) - 1, 'other')} after it" if len(open_ones) > 1 else ""
        return f"waits in {_described(open_ones[0])}{more}"
    if not dump.entries:
        return "has entered no collective"
    return f"waits in no collective; its last one, {_described(dump.entries[-1])}, has ended"


def _described(entry: Entry) -> str:
    return f"{entry.call}{f' of process group {entry.group}' if entry.group != DEFAULT_GROUP else ''}"


def _ranks(dumps: Mapping[int, RankDump]) -> CheckResult:
    size = world_size_of(dumps)
    missing = sorted(set(range(size)) - set(dumps))
    if missing:
        absent = f"there {plural_verb('is', 'are', missing)} no {plural_verb('dump', 'dumps', missing)} of"
        return CheckResult("ranks", "skipped", detail=f"{len(dumps)} of {size}: {absent} {format_ranks(missing)}")
    lost = [rank for rank, dump in dumps.items() if dump.wrapped]
    earlier = f"; earlier collectives of {format_ranks(lost)} are lost" if lost else ""
    return CheckResult("ranks", "passed", detail=f"dumps of {counted(size, 'rank')}{earlier}")


def _collectives(
    dumps: Mapping[int, RankDump], groups: Sequence[GroupLogs], findings: Sequence[Finding], kept: Sequence[Finding]
) -> CheckResult:
    if findings:
        worst = min(findings, key=Finding.sort_key)
        status: CheckStatus = "failed" if worst in kept else "ignored"
        return CheckResult("collectives", status, detail=f"{worst.code}: {worst.message}")
    places = sum(max(map(len, group.logs), default=0) for group in groups)
    if not places:
        return CheckResult("collectives", "skipped", detail="the dumps hold no collective")
    said = [f"{counted(places, 'collective')} of {counted(len(groups), 'process group')} pair up, as far as dumps go"]
    said += _open(dumps)
    return CheckResult("collectives", "passed", detail="; ".join(said))


def _open(dumps: Mapping[int, RankDump]) -> Iterator[str]:
    """What had not ended when the dumps were written, though nothing parts."""
    first = {rank: next((_described(e) for e in dump.entries if not e.ended), "") for rank, dump in dumps.items()}
    for text, ranks in group_by(first, lambda rank: first[rank]).items():
        if text:
            yield f"{format_ranks(ranks)} {plural_verb('was', 'were', ranks)} still in {text}"


def _call_sites(dumps: Mapping[int, RankDump]) -> CheckResult:
    without = [rank for rank, dump in dumps.items() if dump.entries and not dump.has_stacks]
    if without:
        which = f"{plural_verb('dump', 'dumps', without)} of {format_ranks(without)}"
        detail = f"the {which} {plural_verb('holds', 'hold', without)} no lines of the program"
        return CheckResult("call sites", "skipped", detail=detail)
    return CheckResult("call sites", "passed", detail="the lines that call what pairs up are compared as well")
