"""Report on a hung job: divergence and waits, by dumps or a debug server."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from ddpcheck import __version__, load_extra
from ddpcheck.findings.errors import EXIT_TARGET
from ddpcheck.findings.evidence.endings import DEFAULT_GROUP, RankDump, RecordedCall
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, Report, ReportError
from ddpcheck.findings.selection import sort_out
from ddpcheck.findings.wording import format_by_text, format_ranks, group_by, plural, plural_verb
from ddpcheck.report.hang import flight_recorder
from ddpcheck.report.settings import Settings
from ddpcheck.rules.collectives.diagnose import diagnose_dumps
from ddpcheck.rules.collectives.timelines import make_timelines
from ddpcheck.trace.wait_graph import GroupLogs, RanksSeen

_MOST_TIMELINES = 8  # process groups

_USUAL = Settings()


def report_on_hang(source: str, settings: Settings = _USUAL) -> Report:
    """Report on a folder of dumps, or on a live job at `http://HOST:PORT`.

    The folder has one dump per rank. `settings`: rules to report, and findings to ignore or suppress.

    Raises:
        UsageError: There are no readable dumps, or the address is not the address of a debug server.
        TargetError: The debug server or its ranks do not answer.
    """
    if source.startswith(("http://", "https://")):
        seen: RanksSeen = load_extra("debug_server").fetch_rank_states(source)
    else:
        collects_garbage = gc.isenabled()
        gc.disable()  # dumps have no cycles, and reading takes half the time
        try:
            seen = RanksSeen(flight_recorder.read_dumps(Path(source)))
        finally:
            if collects_garbage:
                gc.enable()
    dumps = seen.dumps
    groups = list(flight_recorder.aligned_groups(dumps))
    at_end = {rank: _describe_wait(dump) for rank, dump in dumps.items()} | dict(seen.doing)
    findings = diagnose_dumps(groups, at_end, seen)
    if missing := set(range(flight_recorder.world_size_of(dumps))) - dumps.keys():
        unknown = f"{format_ranks(missing)}: no {seen.source}"
        findings = [replace(finding, evidence=(*finding.evidence, unknown)) for finding in findings]
    causes = {rank for finding in findings for rank in finding.ranks}
    chosen = sort_out(findings, source, select=settings.select, ignore=settings.ignore, suppress=settings.suppress)
    others = "the other ranks do not diverge, and it is not known what these wait for"
    is_unknown = not findings and seen.missing
    report = Report(
        target=source,
        tool={"name": "ddpcheck", "version": __version__},
        world={"world_size": flight_recorder.world_size_of(dumps)},
        checks=(_ranks_line(seen), _collectives_line(seen, groups, findings, chosen.kept), _call_sites_line(seen)),
        error=ReportError(f"{describe_missing_dump(seen.missing)}; {others}", EXIT_TARGET) if is_unknown else None,
        timelines=_timelines(groups, at_end, causes),
    )
    return chosen.complete(report).with_excerpts()


def _timelines(
    groups: Sequence[GroupLogs], at_end: Mapping[int, str], causes: Set[int]
) -> tuple[CollectiveTimeline, ...]:
    """Return one timeline of collective calls per process group, groups with root-cause ranks first."""
    figures = list[CollectiveTimeline]()
    for group in sorted(groups, key=lambda group: causes.isdisjoint(group.members))[:_MOST_TIMELINES]:
        open_calls = {(group.name, rank) for rank in group.waiting}
        coming = set(range(len(group.logs))).difference(causes)
        figures += make_timelines(group.logs, open_calls, at_end, coming, {group.name: group.first})
    return tuple(figures)


def _describe_wait(dump: RankDump) -> str:
    open_calls = [entry for entry in dump.entries if not entry.ended]
    if open_calls:
        more = f", and in {plural(len(open_calls) - 1, 'other')} after it" if len(open_calls) > 1 else ""
        return f"waits in {_call_text(open_calls[0])}{more}"
    if not dump.entries:
        return "has no open collective: all have ended" if dump.enqueued else "has entered no collective"
    return f"waits in no collective; its last one, {_call_text(dump.entries[-1])}, has ended"


def _call_text(entry: RecordedCall) -> str:
    return f"{entry.call}{f' of process group {entry.group}' if entry.group != DEFAULT_GROUP else ''}"


def _ranks_line(seen: RanksSeen) -> CheckResult:
    size = flight_recorder.world_size_of(seen.dumps)
    missing = sorted(set(range(size)) - set(seen.dumps))
    if missing:
        reason = f" ({describe_missing_dump(seen.missing)})" if seen.missing else ""
        detail = f"{len(seen.dumps)} of {size}: no {seen.source} of {format_ranks(missing)}{reason}"
        return CheckResult("ranks", "skipped", detail=detail)
    lost = [rank for rank, dump in seen.dumps.items() if dump.wrapped]
    earlier = f"; earlier collectives of {format_ranks(lost)} are lost" if lost else ""
    return CheckResult("ranks", "passed", detail=f"{seen.source}s of {plural(size, 'rank')}{earlier}")


def _collectives_line(
    seen: RanksSeen, groups: Sequence[GroupLogs], findings: Sequence[Finding], kept: Sequence[Finding]
) -> CheckResult:
    if findings:
        worst = min(findings, key=Finding.sort_key)
        status: CheckStatus = "failed" if worst in kept else "ignored"
        return CheckResult("collectives", status, detail=f"{worst.code}: {worst.message}")
    count = sum(max(map(len, group.logs), default=0) for group in groups)
    if not count:
        return CheckResult("collectives", "skipped", detail=f"the {seen.source}s hold no collective")
    text = f"{plural(count, 'collective')} of {plural(len(groups), 'process group')}"
    parts = [f"{text} in the {seen.source}s pair up", *_pending_phrases(seen)]
    return CheckResult("collectives", "passed", detail="; ".join(parts))


def _pending_phrases(seen: RanksSeen) -> Iterator[str]:
    """Yield phrases on pending calls and activities: "rank 1 was still in all_reduce"."""
    calls = {rank: next((_call_text(e) for e in dump.entries if not e.ended), "") for rank, dump in seen.dumps.items()}
    notes = {rank: f"still in {text}" if text else "" for rank, text in calls.items()}
    for text, ranks in group_by(notes, lambda rank: "" if rank in seen.doing else notes[rank]).items():
        if text:
            yield f"{format_ranks(ranks)} {plural_verb('was', 'were', ranks)} {text}"
    yield from format_by_text(seen.doing.items())


def _call_sites_line(seen: RanksSeen) -> CheckResult:
    if seen.is_live:
        return CheckResult("call sites", "skipped", detail="the debug server gives no lines of calls that have ended")
    missing = [rank for rank, dump in seen.dumps.items() if dump.entries and not dump.has_stacks]
    if missing:
        detail = f"no lines of the program in the dumps of {format_ranks(missing)}"
        return CheckResult("call sites", "skipped", detail=detail)
    return CheckResult("call sites", "passed", detail="no fault in the lines of calls that pair up")


def describe_missing_dump(problems: Mapping[int, str]) -> str:
    """Describe why ranks have no Flight Recorder dump (`problems`: reasons by rank)."""
    reasons = group_by(problems, lambda rank: problems[rank])
    return "; ".join(f"{format_ranks(ranks)}: {reason}" for reason, ranks in reasons.items())
