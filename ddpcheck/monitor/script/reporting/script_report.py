"""The report on a script: what its ranks have left, as one `Report`.

This module is light: it never imports torch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

from ddpcheck import __version__
from ddpcheck.findings.evidence.evaluation import EvaluationPass
from ddpcheck.findings.exception_origin import BUG
from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, Report
from ddpcheck.findings.selection import Suppression, sort_out
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import counted, format_ranks
from ddpcheck.monitor.script.reporting.ending import Ending, failures_of, judge_ending, timelines_of
from ddpcheck.monitor.script.reporting.hang_watch import Unended
from ddpcheck.monitor.script.reporting.log_judging import (
    WatchedWrapper,
    describe_wrappers,
    judge_logs,
    watched_wrappers,
)
from ddpcheck.monitor.script.reporting.program_judging import optimizer_steps
from ddpcheck.stream.entries import SCHEMA, NotCompared, ReplicaCaptured, WatchingFailed
from ddpcheck.stream.watched_rank import WatchedRank

_PARTS = {  # by name of the check: the families of rules, and what was compared
    "parameters": (("DDP1",), "the part of each parameter in the loss, in {steps}"),
    "replicas": (("DDP2", "DDP301", "DDP306"), "modules, parameters, buffers and gradients of the ranks, {times}"),
    "reducer": (("DDP302", "DDP303", "DDP310"), "gradients against the average of the ranks' own, {times}"),
    "loop": (("DDP305", "DDP5"), "forward and backward passes, no_sync, optimizer steps, normalisation, in {steps}"),
}

_NOT_HERE = "not compared with {ranks}, of which nothing is here"


def report_on_script(
    script: str,
    ending: Ending,
    ranks: Sequence[WatchedRank],
    *,
    select: Sequence[str],
    ignore: Sequence[str],
    suppress: Sequence[Suppression] = (),
    baseline: Report | None = None,
) -> Report:
    """The report on a script that has ended.

    Args:
        script: As the user spelled it, with its arguments.
        ending: How it has ended.
        ranks: What the ranks of its last start have left.
        select: Codes, prefixes or names of the rules to report; all where there are none.
        ignore: Those that are not reported.
        suppress: Findings that are shown with a reason, and do not count.
        baseline: An earlier report; what it has is shown as known, and does not count.
    """
    unended = () if ending.unended is None else ending.unended.ranks
    ended = not ending.exit_code and all(rank.has_ended or rank.started.rank in unended for rank in ranks)
    findings = judge_logs(ranks, ended=ended)
    findings += judge_ending(ranks, ending, findings)
    chosen = sort_out(findings, script, select=select, ignore=ignore, suppress=suppress, baseline=baseline)
    wrappers = watched_wrappers(ranks)
    checks = [_entered(ranks, wrappers) if ranks else _none_entered(ending)]
    if ending.hang is not None:
        detail = f"its ranks waited for each other, without progress for {ending.hang.seconds:.0f} s, and were ended"
        checks.insert(0, CheckResult("script", "error", detail=detail))
    elif ending.interrupted:
        where = "; ".join(failure.message for failure in failures_of(ranks, ending))
        checks.insert(0, CheckResult("script", "error", detail=f"it was interrupted: {where or 'no rank was there'}"))
    elif ending.exit_code < 0:
        checks.insert(
            0, CheckResult("script", "error", detail="a rank was killed, or ended without Python's knowledge")
        )
    elif ending.exit_code:
        detail = f"it ended with exit code {ending.exit_code}; what would have come after that is not known"
        if aborted := _aborted_at_exit(ranks, ending):
            detail = (
                f"after its last line {format_ranks(aborted)} ended by SIGABRT: threads of gloo may abort a healthy "
                "process at its exit, under plain torchrun too"
            )
        checks.insert(0, CheckResult("script", "error", detail=detail))
    if any(wrapper.steps for wrapper in wrappers):
        checks += _parts(findings, chosen.kept, wrappers)
    checks += _collectives(ranks, findings, chosen.kept, ended=ended)
    checks += _evaluation(findings, chosen.kept, ranks)
    world: dict[str, Any] = {
        "world_size": max((rank.started.world_size for rank in ranks), default=0),
        "steps": max(wrapper.steps for wrapper in wrappers) if wrappers else optimizer_steps(ranks),
    }
    if ending.unended is not None:
        world["notes"] = [_of_unended(ending.unended)]
    report = Report(
        target=script,
        tool={"name": "ddpcheck", "version": __version__},
        world=world,
        checks=tuple(checks),
        timelines=timelines_of(ranks, ending, findings),
        modules=next((made.modules for rank in ranks[:1] for made in rank.wrappers), ()),
    )
    return chosen.complete(report).with_excerpts()


def _of_unended(unended: Unended) -> str:
    have, them = ("has", "it") if len(unended.ranks) == 1 else ("have", "them")
    return (
        f"{format_ranks(unended.ranks)} {have} run all of the script, did not end for {unended.seconds:.0f} s, and "
        f"then ddpcheck ended {them}. This is no fault of the training: torch can deadlock where a wrapper is freed "
        "after destroy_process_group(), also under plain torchrun. Free it before (del model)"
    )


def _aborted_at_exit(ranks: Sequence[WatchedRank], ending: Ending) -> list[int]:
    """The ranks that were aborted after all of the script had run; none where another rank is at fault."""
    to_the_end = {rank.started.rank for rank in ranks if rank.has_ended}
    aborted = sorted(rank for rank, code in ending.exit_codes.items() if code == -signal.SIGABRT)
    others = set(ending.exit_codes.values()) - {-signal.SIGABRT, -signal.SIGTERM}
    return [] if others or not to_the_end.issuperset(aborted) else aborted


def _none_entered(ending: Ending) -> CheckResult:
    """The check line where no rank was watched: how the script ended before."""
    joined = "joined a process group where ddpcheck could see it"
    if not ending.exit_codes:  # it ended with 0, was interrupted, or its agent has stopped
        return CheckResult("ranks", "skipped", detail=f"no rank {joined}")
    by_signal = ending.exit_code not in ending.exit_codes.values()
    how = f"was ended by signal {ending.exit_code - 128}" if by_signal else f"ended with exit code {ending.exit_code}"
    return CheckResult("ranks", "skipped", detail=f"the script {how} before a rank {joined}")


def _entered(ranks: Sequence[WatchedRank], wrappers: Sequence[WatchedWrapper]) -> CheckResult:
    """The check line on the ranks themselves: which were watched, and to the end."""
    for rank in ranks:
        if failed := [entry for entry in rank.entries if isinstance(entry, WatchingFailed)]:
            last = failed[0].error.strip().splitlines()[-1]
            return CheckResult("ranks", "error", detail=f"rank {rank.started.rank} was not watched to its end: {last}")
    size = max(rank.started.world_size for rank in ranks)
    if missing := _elsewhere(ranks):
        why = f"{format_ranks(missing)} left no log here, so the ranks were not compared"
        return CheckResult("ranks", "skipped", detail=f"{size - len(missing)} of {counted(size, 'rank')}: {why}")
    if unknown := sum(rank.unknown for rank in ranks):
        parts = counted(unknown, "part")
        if all(rank.started.schema == SCHEMA for rank in ranks):
            why = f"{parts} of their logs could not be read; {BUG}"
            return CheckResult("ranks", "error", detail=why)
        why = f"another version of ddpcheck wrote their logs: {parts} of them were not judged"
        return CheckResult("ranks", "skipped", detail=why)
    steps = optimizer_steps(ranks)
    if wrappers and not any(wrapper.steps for wrapper in wrappers):
        names = ", ".join(dict.fromkeys(wrapper.made.module for wrapper in wrappers))
        but = f", in {counted(steps, 'optimizer step')}" if steps else ""
        return CheckResult("ranks", "skipped", detail=f"no backward pass of {names} was averaged{but}")
    if not wrappers and not steps:
        why = "no DistributedDataParallel was constructed, and no optimizer has stepped: nothing to compare"
        if any(rank.constructs for rank in ranks):
            why = "the constructor of DistributedDataParallel has not come to its end"
        return CheckResult("ranks", "skipped", detail=why)
    watched = describe_wrappers(wrappers) or f"no DistributedDataParallel, {counted(steps, 'optimizer step')}"
    detail = f"{counted(size, 'rank')} ({ranks[0].started.backend}), {watched}"
    return CheckResult("ranks", "passed", detail=detail)


def _parts(
    findings: Sequence[Finding], kept: Sequence[Finding], wrappers: Sequence[WatchedWrapper]
) -> Iterator[CheckResult]:
    """The check line on each part of what a watch looks at."""
    steps = max(wrapper.steps for wrapper in wrappers)
    times = max(len({id(entry) for _, entry in w.entries(ReplicaCaptured)}) // len(w.ranks) for w in wrappers)
    for name, (families, what) in _PARTS.items():
        if own := [finding for finding in findings if finding.code.startswith(families)]:
            yield _failed(name, own, kept)
        elif elsewhere := sorted({rank for one in wrappers if not one.is_whole for rank in one.missing}):
            yield CheckResult(name, "skipped", detail=_NOT_HERE.format(ranks=format_ranks(elsewhere)))
        elif "{times}" in what and not times:
            why = {entry.why for one in wrappers for _, entry in one.entries(NotCompared)}
            yield CheckResult(name, "skipped", detail=": ".join(["no step was compared", *sorted(why)[:1]]))
        else:
            said = what.format(steps=counted(steps, "step"), times=f"compared {counted(times, 'time')}")
            yield CheckResult(name, "passed", detail=said)


def _elsewhere(ranks: Sequence[WatchedRank]) -> list[int]:
    """The ranks that have left no log here."""
    size = max((rank.started.world_size for rank in ranks), default=0)
    return sorted(set(range(size)) - {rank.started.rank for rank in ranks})


def _collectives(
    ranks: Sequence[WatchedRank], findings: Sequence[Finding], kept: Sequence[Finding], *, ended: bool
) -> Iterator[CheckResult]:
    """The check line on the collectives of the ranks: whether they have come together."""
    own = [finding for finding in findings if finding.code.startswith("DDP4")]
    calls = [rank.first_call + len(rank.calls) for rank in ranks]
    if own:
        yield _failed("collectives", own, kept)
    elif any(calls) and (elsewhere := _elsewhere(ranks)):
        yield CheckResult("collectives", "skipped", detail=_NOT_HERE.format(ranks=format_ranks(elsewhere)))
    elif any(calls) and ended:
        yield CheckResult("collectives", "passed", detail=f"{counted(max(calls), 'call')} of each rank, which pair up")
    elif any(calls):
        yield CheckResult("collectives", "skipped", detail="the ranks have not come to the end of the script")


def _evaluation(
    findings: Sequence[Finding], kept: Sequence[Finding], ranks: Sequence[WatchedRank]
) -> Iterator[CheckResult]:
    """The check line on evaluations, where there are any."""
    passes = sum(isinstance(entry, EvaluationPass) for rank in ranks[:1] for entry in rank.entries)
    if own := [finding for finding in findings if finding.code.startswith("DDP8")]:
        yield _failed("evaluation", own, kept)
    elif passes and len(ranks) == ranks[0].started.world_size > 1:
        what = "the numbers and labels that were exchanged and shown"
        yield CheckResult("evaluation", "passed", detail=f"{what}, after {counted(passes, 'loop')} without backward")


def _failed(name: str, own: Sequence[Finding], kept: Sequence[Finding]) -> CheckResult:
    worst = min(own, key=lambda finding: (finding not in kept, finding.sort_key()))
    status: CheckStatus = "failed" if worst.severity is Severity.ERROR else "warned"
    return CheckResult(name, status if worst in kept else "ignored", detail=f"{worst.code}: {worst.message}")
