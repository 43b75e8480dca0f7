"""The report on a job that hung: where its ranks part, and who waits where, by its dumps or by its debug server."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpcheck import __version__
from ddpcheck.findings.errors import EXIT_TARGET
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.findings.program_blocks import blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, Location, Report, ReportError
from ddpcheck.findings.selection import Suppression, sort_out
from ddpcheck.findings.wording import counted, format_ranks, group_by, one_finding, plural_verb, told_together
from ddpcheck.judge.endings.branch_endings import lines_of
from ddpcheck.judge.endings.collective_order import judge_partings
from ddpcheck.judge.endings.stories import judge_endings
from ddpcheck.judge.endings.timelines import timelines
from ddpcheck.report.hang import flight_recorder
from ddpcheck.report.hang.debug_server import DebugServer, RanksSeen, look_at_ranks, said_of_missing

_MOST_TIMELINES = 8  # of process groups


def report_on_hang(
    source: str, *, select: Sequence[str] = (), ignore: Sequence[str] = (), suppress: Sequence[Suppression] = ()
) -> Report:
    """The report on the dumps in a folder, one a rank, or on a job whose debug server listens at `http://HOST:PORT`.

    The rules to report, and what does not count, are given as to `ddpcheck.check`.

    Raises:
        UsageError: There are no dumps that can be read, or no debug server listens there.
        TargetError: The debug server or its ranks do not answer.
    """
    with _without_collector():
        is_live = source.startswith(("http://", "https://"))
        seen = look_at_ranks(DebugServer(source)) if is_live else RanksSeen(flight_recorder.read_dumps(Path(source)))
    dumps = seen.dumps
    groups = list(flight_recorder.line_up(dumps))
    at_end = {rank: _wait(dump) for rank, dump in dumps.items()} | dict(seen.doing)
    findings = [finding for group in groups for finding in _judge(group, at_end, seen)]
    chosen = sort_out(findings, source, select=select, ignore=ignore, suppress=suppress)
    report = Report(
        target=source,
        tool={"name": "ddpcheck", "version": __version__},
        world={"world_size": flight_recorder.world_size_of(dumps)},
        checks=(_ranks(seen), _collectives(seen, groups, findings, chosen.kept), _call_sites(seen)),
        error=_error(seen, findings),
        timelines=tuple(one for group in groups for one in _timelines(group, at_end, seen))[:_MOST_TIMELINES],
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


def _judge(group: flight_recorder.GroupLogs, at_end: Mapping[int, str], seen: RanksSeen) -> list[Finding]:
    """DDP403 where the ranks of a group part; DDP402 where one waits alone in a group whose ranks are not known."""
    here = set(at_end)
    waits = [f"rank {rank}: {said}" for rank, said in at_end.items()]
    found = judge_partings(group.logs, _coming(group, seen), {group.name: group.first})
    if not found and not group.are_known and len(group.members) == 1:
        (rank,) = group.members
        pairs = zip(group.logs[rank], group.ended[rank], strict=True)
        call = next((call for call, ended in pairs if not ended), None)
        if call is not None and not seen.at_work:
            found = one_finding(
                "DDP402",
                (call.operation,),
                f"Rank {rank} waits in {call} of process group {group.name}, and no {seen.source} shows another "
                "rank in a collective of that group.",
                ranks=(rank,),
                location=Location.parse(call.location),
            )
    if found and (story := _story(group, at_end, seen)):
        numbers = [f"by the collectives of the ranks: {one.message}" for one in found]
        found = [replace(one, evidence=(*one.evidence, *numbers), tags=found[0].tags) for one in story]
        waits = []  # is in the story
    missing = sorted(set(group.members) - here)
    unknown = [f"{format_ranks(missing)}: no {seen.source}"] if missing else []
    which = [f"process group {group.name}"] if group.name != flight_recorder.DEFAULT_GROUP else []
    return [replace(one, evidence=(*which, *one.evidence, *waits, *unknown)) for one in found]


def _story(group: flight_recorder.GroupLogs, at_end: Mapping[int, str], seen: RanksSeen) -> list[Finding]:
    """What one rank of the group did and the others did not; by the program, too, where its files are here."""
    members = sorted(set(group.members) & set(at_end))
    ranks = [
        RankAtEnd(
            rank,
            [replace(call, members=tuple(members)) for call in log],
            group.first,
            at_end[rank],
            seen.lines.get(rank, ()),
            waits=rank not in seen.at_work,
            ended=rank in seen.over,
        )
        for rank, log in enumerate(group.logs)
        if rank in members
    ]
    lines = {line for rank in ranks for call in rank.calls for line in lines_of(call)}
    return judge_endings(ranks, blocks_of_lines(lines))


def _coming(group: flight_recorder.GroupLogs, seen: RanksSeen) -> set[int]:
    """The ranks that may still come to what the others have called.

    A dump is of one moment, and that of another rank of another: what has ended, others have come to or will.
    """
    return {*seen.at_work, *group.behind} | {
        rank
        for rank, log in enumerate(group.logs)
        if all(all(ended[len(log) :]) for other, ended in enumerate(group.ended) if other != rank)
    }


def _timelines(
    group: flight_recorder.GroupLogs, at_end: Mapping[int, str], seen: RanksSeen
) -> tuple[CollectiveTimeline, ...]:
    open_ones = {(group.name, rank) for rank, ended in enumerate(group.ended) if ended and not ended[-1]}
    return timelines(group.logs, open_ones, at_end, _coming(group, seen), {group.name: group.first})


def _wait(dump: flight_recorder.RankDump) -> str:
    """What a rank waits for, by its dump."""
    open_ones = [entry for entry in dump.entries if not entry.ended]
    if open_ones:
        more = f", and in {counted(len(open_ones) - 1, 'other')} after it" if len(open_ones) > 1 else ""
        return f"waits in {_described(open_ones[0])}{more}"
    if not dump.entries:
        return "has entered no collective"
    return f"waits in no collective; its last one, {_described(dump.entries[-1])}, has ended"


def _described(entry: flight_recorder.Entry) -> str:
    return f"{entry.call}{f' of process group {entry.group}' if entry.group != flight_recorder.DEFAULT_GROUP else ''}"


def _ranks(seen: RanksSeen) -> CheckResult:
    size = flight_recorder.world_size_of(seen.dumps)
    missing = sorted(set(range(size)) - set(seen.dumps))
    if missing:
        absent = (
            f"there {plural_verb('is', 'are', missing)} no {plural_verb(seen.source, f'{seen.source}s', missing)} of"
        )
        why = f" ({said_of_missing(seen.missing)})" if seen.missing else ""
        said = f"{len(seen.dumps)} of {size}: {absent} {format_ranks(missing)}{why}"
        return CheckResult("ranks", "skipped", detail=said)
    lost = [rank for rank, dump in seen.dumps.items() if dump.wrapped and not dump.active_only]
    earlier = f"; earlier collectives of {format_ranks(lost)} are lost" if lost else ""
    return CheckResult("ranks", "passed", detail=f"{seen.source}s of {counted(size, 'rank')}{earlier}")


def _error(seen: RanksSeen, findings: Sequence[Finding]) -> ReportError | None:
    """Why no verdict can be given on a job whose ranks do not all answer."""
    if findings or not seen.missing:
        return None
    said = f"{said_of_missing(seen.missing)}; the other ranks do not part, and what these wait for is not known"
    return ReportError(said, EXIT_TARGET)


def _collectives(
    seen: RanksSeen, groups: Sequence[flight_recorder.GroupLogs], findings: Sequence[Finding], kept: Sequence[Finding]
) -> CheckResult:
    if findings:
        worst = min(findings, key=Finding.sort_key)
        status: CheckStatus = "failed" if worst in kept else "ignored"
        return CheckResult("collectives", status, detail=f"{worst.code}: {worst.message}")
    places = sum(max(map(len, group.logs), default=0) for group in groups)
    if not places:
        return CheckResult("collectives", "skipped", detail=f"the {seen.source}s hold no collective")
    which = f"{counted(places, 'collective')} of {counted(len(groups), 'process group')}"
    said = [f"{which} pair up, as far as {seen.source}s go", *_open(seen)]
    return CheckResult("collectives", "passed", detail="; ".join(said))


def _open(seen: RanksSeen) -> Iterator[str]:
    """What had not ended when the dumps were written, though nothing parts; of a job that runs, what its ranks do."""
    first = {rank: next((_described(e) for e in dump.entries if not e.ended), "") for rank, dump in seen.dumps.items()}
    said = {rank: f"still in {text}" if text else "" for rank, text in first.items()}
    for text, ranks in group_by(said, lambda rank: "" if rank in seen.doing else said[rank]).items():
        if text:
            yield f"{format_ranks(ranks)} {plural_verb('was', 'were', ranks)} {text}"
    yield from told_together(seen.doing.items())


def _call_sites(seen: RanksSeen) -> CheckResult:
    if seen.is_live:
        return CheckResult("call sites", "skipped", detail="the debug server gives no lines of calls that have ended")
    without = [rank for rank, dump in seen.dumps.items() if dump.entries and not dump.has_stacks]
    if without:
        which = f"{plural_verb('dump', 'dumps', without)} of {format_ranks(without)}"
        detail = f"the {which} {plural_verb('holds', 'hold', without)} no lines of the program"
        return CheckResult("call sites", "skipped", detail=detail)
    return CheckResult("call sites", "passed", detail="the lines that call what pairs up are compared as well")
