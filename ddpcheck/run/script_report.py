"""Build the `Report` on a finished script, or on an active run (`ddpcheck live`)."""

from __future__ import annotations

import getpass
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck import __version__
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.files import belongs_to_user
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, Report, Severity
from ddpcheck.findings.rules import is_selected, rules_of_check
from ddpcheck.findings.selection import sort_out
from ddpcheck.findings.stacks import main_stack, program_lines
from ddpcheck.findings.tracebacks import BUG, as_bug
from ddpcheck.findings.wording import format_by_text, format_ranks, join_names, plural
from ddpcheck.report.settings import Settings
from ddpcheck.rules.loss.ddp314_differs_from_single_process import codes_that_explain
from ddpcheck.rules.others import judge_third_party_rules
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.registry import judge_all, verdicts_of
from ddpcheck.rules.script_table import HEADINGS, views_of
from ddpcheck.rules.verdict import FindingAndCause, Judged, Verdict, status_of
from ddpcheck.run.ending import Ending, call_of_ddp, failures_of, judge_ending, timelines_of
from ddpcheck.run.hang_watch import Hang, NotExited
from ddpcheck.run.live_ranks import LiveRanks, processor_times
from ddpcheck.run.parity_run import SingleRun
from ddpcheck.run.run_folder import user_log_folders
from ddpcheck.stream.entries import SCHEMA, UNNUMBERED, NotCompared
from ddpcheck.stream.rank_log import FOLDER, SCRIPT, RankTrace, read_logs
from ddpcheck.trace.divergences import Parity
from ddpcheck.trace.failures import describe_failure
from ddpcheck.trace.parity_curves import curves
from ddpcheck.trace.rank_params import RankParams
from ddpcheck.trace.script_facts import ScriptFacts, entries_of
from ddpcheck.trace.wrappers import describe_missing_ranks
from ddpcheck.worlds import failures

_DEFAULT_SETTINGS = Settings()
_WITHOUT_RANK_PARAMS = ("replicas", "reducer", "optimizers")  # check lines that leave out parameters of single ranks


def report_on_script(
    script: str,
    ending: Ending,
    ranks: Sequence[RankTrace],
    settings: Settings = _DEFAULT_SETTINGS,
    *,
    baseline: Report | None = None,
    source: ProgramSource | None = None,
    singles: Sequence[SingleRun] = (),
) -> Report:
    """Build the report on a finished script or an active run.

    Args:
        script: Command line.
        ending: Exit codes, signals and hangs of the script.
        ranks: Logs of the ranks since the last start or restart.
        settings: Selected, ignored and suppressed rules.
        baseline: Earlier report; findings that it contains do not fail the check.
        source: Recorded answers on the source of the script, if the source is not on this machine.
        singles: Up to three single-process runs: to compare, to measure noise, and as another rank, in this order.
    """
    unended = () if ending.not_exited is None else ending.not_exited.ranks
    ended = not ending.exit_code and all(rank.has_ended or rank.started.rank in unended for rank in ranks)
    rank_params = RankParams(settings.rank_parameters)
    facts = ScriptFacts(ranks, ended=ended, source=source, rank_params=rank_params)
    judged = judge_all(facts, views_of(facts), facts.unwatched)
    at_end = judge_ending(ranks, ending, judged.findings, facts.source)
    judged = judged.with_findings("collectives", locate_restored_file(at_end, facts.events(FileUsed)))
    parity = _judge_parity(comparison := _parity_view(ranks, singles), singles)
    select, ignore, suppress = settings.select, settings.ignore, settings.suppress
    equal = {} if comparison is None or isinstance(parity, Exception) else comparison.confirmed
    judged, cause = _add_parity(judged, parity, script, settings)
    findings_of_others, notes_of_others = judge_third_party_rules(facts, settings.rules_severity)
    for heading, finding in findings_of_others:
        judged = judged.with_findings(heading, [finding])
    chosen = sort_out(judged.findings, script, select=select, ignore=ignore, suppress=suppress, baseline=baseline)
    status, detail = _ranks_verdict(facts, ending)
    checks = [*_script_check(ranks, ending), CheckResult("ranks", status, detail=detail + rank_params.left_out)]
    for heading in HEADINGS:
        if heading == "parity" and heading not in facts.unwatched:
            check = (
                None if parity is None else _parity_verdict(parity, judged.causes.get(heading, ()), chosen.kept, cause)
            )
        else:
            check = _check_of(heading, facts, judged, chosen.kept, equal)
        if check is not None:
            codes = () if heading == "collectives" else rules_of_check("run", heading)
            asked = not codes or any(is_selected(code, select, ignore) for code in codes)
            left_out = rank_params.left_out if heading in _WITHOUT_RANK_PARAMS else ""
            checks.append(CheckResult(heading, check[0], detail=check[1] + left_out, asked=asked))
    report = Report(
        target=script,
        tool={"name": "ddpcheck", "version": __version__},
        world=_world_facts(facts, ending, [*notes_of_others, *rank_params.unmatched]),
        checks=tuple(checks),
        timelines=timelines_of(ranks, ending, judged.findings),
        curves=() if comparison is None else curves(comparison),
        modules=next((wrapper.modules for rank in ranks[:1] for wrapper in rank.wrappers), ()),
    )
    return chosen.complete(report).with_excerpts()


def _add_parity(
    judged: Judged, parity: Verdict | Exception | None, script: str, settings: Settings
) -> tuple[Judged, str]:
    """Add parity findings unless other findings explain the difference; also return the explaining codes."""
    if not isinstance(parity, Verdict) or not parity.findings:
        return judged, ""
    kept = sort_out(judged.findings, script, select=settings.select, ignore=settings.ignore).kept
    cause = join_names(codes_that_explain(parity.findings[0], kept))
    return judged.with_findings("parity", [] if cause else parity.findings), cause


def _check_of(
    heading: str, facts: ScriptFacts, judged: Judged, kept: Sequence[Finding], equal: Mapping[str, str]
) -> tuple[CheckStatus, str] | None:
    """Return status and detail of a check line (`equal`: values that parity confirms)."""
    if (why := facts.unwatched.get(heading)) is not None:
        return "error", why
    if heading == "collectives":
        return _collectives_verdict(facts, judged.causes.get(heading, ()), kept)
    if (error := judged.errors.get(heading)) is not None:
        return "error", f"not judged, since ddpcheck itself failed: {as_bug(error)}"
    check = judged.status_of(heading, kept)
    before, _, rest = check[1].partition("not compared") if check is not None else ("", "", "")
    return ("passed", before + equal[heading]) if rest and ";" not in rest and heading in equal else check


def _report_notes(facts: ScriptFacts, ending: Ending) -> Iterator[str]:
    if ending.not_exited is not None:
        yield _describe_not_exited(ending.not_exited)
    if facts.ranks and (restart := facts.ranks[0].started.restart) < ending.restart:
        yield (
            f"torchrun has started the ranks {plural(ending.restart + 1, 'time')}: this is the report on start "
            f"{restart + 1}, and after that no rank joined a process group where ddpcheck could see it"
        )
    if (launched := max((rank.started.launched for rank in facts.ranks), default=0)) > 1:
        yield (
            f"torchrun has started the script {launched} times, and each process starts its own ranks: leave "
            "--nproc-per-node out"
        )
    if facts.world_size == 1:
        yield "one rank: nothing is compared between ranks; start two with --standalone --nproc-per-node 2"


def _parity_view(ranks: Sequence[RankTrace], singles: Sequence[SingleRun]) -> Parity | None:
    if not singles or singles[0].why_not:
        return None
    others = [None if run.why_not else run.ranks[0] for run in singles[1:]]
    return Parity(ranks, singles[0].ranks[0], *others)


def _judge_parity(comparison: Parity | None, singles: Sequence[SingleRun]) -> Verdict | Exception | None:
    if comparison is None:
        return Verdict(lacking=f"not compared with a single process: {singles[0].why_not}") if singles else None
    try:
        return verdicts_of(comparison)["parity"]
    except Exception as error:
        return error


def _parity_verdict(
    verdict: Verdict | Exception, explained: Sequence[FindingAndCause], kept: Sequence[Finding], others: str
) -> tuple[CheckStatus, str] | None:
    if isinstance(verdict, Exception):
        return "error", f"not judged, since ddpcheck itself failed: {as_bug(verdict)}"
    if verdict.findings and others:
        first = verdict.findings[0]
        status: CheckStatus = "failed" if first.severity is Severity.ERROR else "warned"
        return status, f"{first.message} ({others} may explain this)"
    return status_of(verdict, explained, kept)


def _world_facts(facts: ScriptFacts, ending: Ending, more_notes: Sequence[str]) -> dict[str, Any]:
    steps = facts.steps if facts.wrappers else facts.optimizer_steps
    notes = [*_report_notes(facts, ending), *more_notes]
    return {"world_size": facts.world_size, "steps": steps, **({"notes": notes} if notes else {})}


def _script_check(ranks: Sequence[RankTrace], ending: Ending) -> list[CheckResult]:
    """Return a check line if the script still runs or ended early, else []."""
    if ending.doing:
        activities = "; ".join(format_by_text(ending.doing.items()))
        if ending.hang is None:
            return [CheckResult("script", "skipped", detail=f"it is still running: {activities}")]
        waited = f"its ranks wait for each other, without progress for {ending.hang.seconds:.0f} s"
        return [CheckResult("script", "error", detail=f"{waited}: {activities}")]
    why = _why_ended(ranks, ending)
    return [CheckResult("script", "error", detail=why)] if why else []


def _why_ended(ranks: Sequence[RankTrace], ending: Ending) -> str:
    """Return the reason why a script ended early; "" if the script finished."""
    if ending.hang is not None:
        return f"its ranks waited for each other, without progress for {ending.hang.seconds:.0f} s, and were ended"
    if ending.interrupted:
        messages = "; ".join(failure.message for failure in failures_of(ranks, ending))
        return f"it was interrupted: {messages or 'no rank was there'}"
    if ending.exit_code < 0:
        return "a rank was killed, or ended without a Python exception"
    if ending.exit_code and (aborted := _aborted_at_exit(ranks, ending)):
        return (
            f"after its last line {format_ranks(aborted)} ended by SIGABRT: threads of gloo may abort a healthy "
            "process at its exit, even under plain torchrun"
        )
    return f"it exited with code {ending.exit_code}; nothing after that was checked" if ending.exit_code else ""


def _describe_not_exited(unended: NotExited) -> str:
    have, them = ("has", "it") if len(unended.ranks) == 1 else ("have", "them")
    return (
        f"{format_ranks(unended.ranks)} {have} run all of the script, but did not exit for {unended.seconds:.0f} s, so "
        f"ddpcheck ended {them}. This is not a fault of the training: torch can deadlock if a wrapper is freed after "
        "destroy_process_group(), even under plain torchrun. Free it before that (del model)"
    )


def _aborted_at_exit(ranks: Sequence[RankTrace], ending: Ending) -> list[int]:
    """Return the ranks that aborted after the script finished; [] after any other failure."""
    to_the_end = {rank.started.rank for rank in ranks if rank.has_ended}
    aborted = sorted(rank for rank, code in ending.exit_codes.items() if code == -signal.SIGABRT)
    others = set(ending.exit_codes.values()) - {-signal.SIGABRT, -signal.SIGTERM}
    return [] if others or not to_the_end.issuperset(aborted) else aborted


def _verdict_without_ranks(ending: Ending) -> tuple[CheckStatus, str]:
    joined = "joined a process group where ddpcheck could see it"
    if not ending.exit_codes:  # exit code 0, interrupted, or the agent stopped
        return "skipped", f"no rank {joined}; for a recipe, use `ddpcheck report`"
    by_signal = ending.exit_code not in ending.exit_codes.values()
    end = f"was ended by signal {ending.exit_code - 128}" if by_signal else f"ended with exit code {ending.exit_code}"
    return "skipped", f"the script {end} before a rank {joined}; see the script's own error"


def _ranks_verdict(facts: ScriptFacts, ending: Ending) -> tuple[CheckStatus, str]:
    ranks, size, steps = facts.ranks, facts.world_size, facts.optimizer_steps
    if ending.unwatched:
        return "error", "; ".join(ending.unwatched)
    if not ranks:
        return _verdict_without_ranks(ending)
    if why := facts.unwatched.get("ranks"):
        return "error", why
    if missing := facts.remote_ranks:
        why = f"{format_ranks(missing)} left no log here, so the ranks were not compared"
        return "skipped", f"{size - len(missing)} of {plural(size, 'rank')}: {why}"
    if unknown := sum(rank.unknown for rank in ranks):
        parts = plural(unknown, "part")
        if all(rank.started.schema == SCHEMA for rank in ranks):
            return "error", f"{parts} of their logs could not be read; {BUG}"
        return "skipped", f"another version of ddpcheck wrote their logs: {parts} of them were not judged"
    reasons = {entry.wrapper: entry.why for rank in ranks for entry in entries_of(rank, NotCompared)}
    if UNNUMBERED in reasons:
        return "skipped", f"{reasons[UNNUMBERED]}: use plain DDP under ddpcheck run"
    if facts.wrappers and not facts.steps:
        names = ", ".join(dict.fromkeys(wrapper.made.module for wrapper in facts.wrappers))
        if reasons:
            return "skipped", f"no step of {names} was compared: {'; '.join(sorted({*reasons.values()}))}"
        suffix = f", in {plural(steps, 'optimizer step')}" if steps else ""
        return "skipped", f"no backward pass of {names} was averaged{suffix}"
    if not facts.wrappers and not steps:
        why = "no DistributedDataParallel was constructed, and no optimizer has stepped: nothing to compare"
        if any(rank.is_constructing for rank in ranks):
            why = "the constructor of DistributedDataParallel has not returned"
        return "skipped", why
    if not facts.wrappers and (why := facts.why_unwatched):
        return "skipped", f"no DistributedDataParallel was constructed; {why}"
    watched = _describe_wrappers(facts) or f"no DistributedDataParallel, {plural(steps, 'optimizer step')}"
    return "passed", f"{plural(size, 'rank')} ({ranks[0].started.backend}), {watched}"


def _describe_wrappers(facts: ScriptFacts) -> str:
    counts = Counter(f"{wrapper.made.module} ({plural(wrapper.steps, 'step')})" for wrapper in facts.wrappers)
    return ", ".join(f"{times} times {name}" if times > 1 else name for name, times in counts.items())


def _collectives_verdict(
    facts: ScriptFacts, explained: Sequence[FindingAndCause], kept: Sequence[Finding]
) -> tuple[CheckStatus, str] | None:
    calls = max((rank.first_call + len(rank.calls) for rank in facts.ranks), default=0)
    if not calls and not explained:
        return None
    lacking = describe_missing_ranks(facts.remote_ranks) or (
        "" if facts.ended else "the ranks have not reached the end of the script"
    )
    passed = "" if lacking else f"{plural(calls, 'call')} of each rank pair up"
    return status_of(Verdict((), passed, lacking), explained, kept)


_INTERVAL = 3.0  # seconds between two looks at the ranks of an active run


def report_on_run(folder: Path, settings: Settings) -> Report:
    """Report on an active run in about 4 s; raise `UsageError` without live ranks."""
    processes = LiveRanks(folder)
    before, since, progress = processor_times(processes.live_pids()[0]), time.monotonic(), processes.progress()
    time.sleep(_INTERVAL)
    ranks, are_all_here = processes.live_pids()
    if not ranks:
        raise UsageError(f"no live rank has a log in {folder}: is it the folder of a `ddpcheck run`?")
    seconds = time.monotonic() - since
    facts, stacks = processes.facts(ranks, before, seconds), processes.stacks(ranks)
    moving = {int(name.split("-")[1]) for name, state in processes.progress().items() if progress.get(name) != state}
    logs = read_logs(folder)
    waiting = {rank: stacks.get(rank, "") for rank in ranks if facts[rank].waits(main_stack(stacks.get(rank, "")))}
    hangs = are_all_here and not moving and len(waiting) == len(ranks)
    doing = {log.started.rank: _activity_of(log, stacks, moving, waiting) for log in logs if log.started.rank in ranks}
    ending = Ending(hang=Hang(seconds, waiting) if hangs else None, doing=doing)
    return report_on_script((folder / SCRIPT).read_text(), ending, logs, settings)


def _activity_of(log: RankTrace, stacks: dict[int, str], moving: set[int], waiting: dict[int, str]) -> str:
    rank = log.started.rank
    lines = program_lines(stacks.get(rank, ""))
    where = f" at {lines[0]}" if lines else " in code of a library"
    steps = f", after {plural(max(ended for _, ended in log.counts), 'step')}" if log.counts else ""
    if rank in moving:
        return f"was{where}, and made progress{steps}"
    if rank in waiting:
        stuck = failures.failure_of_running_rank(rank, 0.0, waiting[rank], "", call_of_ddp(log, waiting[rank]))
        return f"{describe_failure(stuck)}{steps}"
    return f"is{where}{steps}"


def find_active_run(folder: str | None) -> Path:
    """Return the log folder of an active run, by default the user's only run.

    Raises `UsageError` if no run or several runs match, or the system is not Linux.
    """
    if sys.platform != "linux":
        raise UsageError("ddpcheck live looks at processes by /proc, which only Linux has")
    if folder is not None:
        if not belongs_to_user(Path(folder)) or not (Path(folder) / SCRIPT).is_file():
            raise UsageError(f"{folder} is not the folder of an active `ddpcheck run`")
        return Path(folder)
    runs = [path for path in user_log_folders() if (path / SCRIPT).exists() and LiveRanks(path).live_pids()[0]]
    if len(runs) == 1:
        return runs[0]
    where = f"{tempfile.gettempdir()}/{FOLDER}*"
    if not runs:
        raise UsageError(f"no active `ddpcheck run` of user {getpass.getuser()} found ({where})")
    listing = "; ".join(f"{path} ({(path / SCRIPT).read_text()})" for path in runs)
    raise UsageError(f"{len(runs)} active runs; name the folder of one: {listing}")
