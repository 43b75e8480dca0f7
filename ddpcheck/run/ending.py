"""Find the cause of failed or hung ranks from exit codes and stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import SYSTEM_EXIT, Joining, RankAtEnd
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.findings.program_blocks import ProgramSource, blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.findings.source_lines import call_of, exits_raised
from ddpcheck.findings.stacks import (
    CONSTRUCTOR,
    FORWARD,
    WORKERS,
    collective_of,
    collectives_of_threads,
    is_waiting,
    lock_waited_for,
    main_stack,
    program_lines,
    program_threads,
    region_of,
    traceback_stack,
    waits_for_ranks,
)
from ddpcheck.findings.wording import join_names
from ddpcheck.rules.collectives.diagnose import diagnose
from ddpcheck.rules.collectives.first_divergence import mismatch_number
from ddpcheck.rules.collectives.timelines import make_timelines, mismatched_timelines
from ddpcheck.run.hang_watch import Hang, NotExited
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, RankRaised, lines_in
from ddpcheck.stream.rank_log import RankTrace, comparable_logs
from ddpcheck.trace.failures import EndedThread, FailureFacts, describe_failure, follows_from_another_rank
from ddpcheck.trace.positions import EndingFacts, describe_call, lines_of
from ddpcheck.trace.script_facts import entries_of
from ddpcheck.worlds import failures


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a script: exit codes, signals and hangs of its ranks."""

    exit_code: int = 0  # exit code of the whole script
    # exit codes of the failed ranks, by rank; negative for a signal
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    hang: Hang | None = None  # None if no hang was detected
    interrupted: bool = False  # True if a signal of a user or scheduler ended the script
    not_exited: NotExited | None = None  # ranks that finished the script but did not exit
    # processes that did not return from `init_process_group`, if one raised and none returned
    joining: tuple[Joining, ...] = ()
    unwatched: tuple[str, ...] = ()  # reasons why ranks are not observed, one sentence each
    restart: int = 0  # number of restarts by torchrun
    # rank -> activity, such as "is at train.py:12", if the script is still running
    doing: Mapping[int, str] = field(default_factory=dict)


def judge_ending(
    ranks: Sequence[RankTrace], ending: Ending, known: Sequence[Finding], source: ProgramSource | None = None
) -> list[Finding]:
    """Return findings DDP401 to 404 on failed ranks, unless a `known` finding explains them."""
    if ending.hang is not None and ending.hang.joining:
        return diagnose(FailureFacts(joining=ending.hang.joining, hang_seconds=ending.hang.seconds))
    if not ranks:
        return diagnose(FailureFacts(joining=ending.joining))
    if [rank.started.rank for rank in ranks] != list(range(ranks[0].started.world_size)):
        return []  # ranks on other machines have no log here
    known = [finding for finding in known if finding.severity is Severity.ERROR and RULES[finding.code].stops_run]
    return list(map(_with_run_options, diagnose(_failure_facts(ranks, ending, known, source or ProgramSource()))))


def _failure_facts(
    ranks: Sequence[RankTrace], ending: Ending, known: Sequence[Finding], source: ProgramSource
) -> FailureFacts:
    failed = failures_of(ranks, ending)
    ordered = failures.sort_failures(failed)
    first = ranks[ordered[0].rank if ordered else 0]
    failed_ranks = {failure.rank for failure in failed}
    at_work = {}
    for number, rank in enumerate(ranks):
        stack = main_stack(rank.stack)
        if number not in failed_ranks and not rank.has_ended and stack and not waits_for_ranks(stack):
            locs = program_lines(rank.stack)
            at_work[number] = [loc for loc in locs if loc.rpartition(":")[0] in first.files] or list(locs)
    stacks = {} if ending.hang is None else ending.hang.stacks
    return FailureFacts(
        ordered,
        comparable_logs(ranks),
        [number for number, rank in enumerate(ranks) if rank.has_ended and number not in failed_ranks],
        ending.exit_code,
        interrupted=ending.interrupted,
        hang_seconds=None if ending.hang is None else ending.hang.seconds,
        threads=_ended_threads(ranks, ending),
        thread_calls=[
            f"another thread of rank {number} waits in {call}"
            for number, dump in stacks.items()
            for call in collectives_of_threads(dump)
        ],
        find_positions=partial(_ending_facts, ranks, ending if failed else Ending(), source),
        constructing=[number for number, rank in enumerate(ranks) if rank.is_constructing],
        known=known,
        begun=entries_of(first, WrapperBegun),
        replaced=[entry for entry in entries_of(first, ModuleChanged) if entry.what == "replaced"],
        sharded=[wrapper for wrapper in first.wrappers if wrapper.context.sharded is not None],
        clipped=next((entry.reply.get("clipped", ()) for entry in entries_of(first, RankRaised)), ()),
        at_work={number: lines for number, lines in at_work.items() if lines},
        checkpoint=source.ask(call_of, _CHECKPOINTS, first.files) if ordered and ordered[0].kind == "raised" else None,
    )


_CHECKPOINTS = ("checkpoint", "checkpoint_sequential", "gradient_checkpointing_enable")


def _ended_threads(ranks: Sequence[RankTrace], ending: Ending) -> list[EndedThread]:
    threads = []
    for rank in ranks:
        dump = rank.stack if ending.hang is None else ending.hang.stacks.get(rank.started.rank, "")
        lock = "" if program_threads(dump) else lock_waited_for(main_stack(dump))
        for error in rank.thread_errors:
            threads.append(
                EndedThread(error.thread, failures.failure_of_exception(rank.started.rank, dict(error.reply)), lock)
            )
    return threads


def _with_run_options(finding: Finding) -> Finding:
    advice = finding.what_to_do.replace("--timeout", "--check-timeout").replace(", --world-size 2", "")
    return finding if advice == finding.what_to_do else replace(finding, fix=advice)


def _ending_facts(ranks: Sequence[RankTrace], ending: Ending, source: ProgramSource) -> EndingFacts:
    at_end = ranks_at_end(ranks, ending, source)
    lines = {line for rank in at_end for call in rank.calls for line in (*lines_of(call), *lines_in(call.place))}
    lines |= {line for rank in at_end for line in rank.lines}
    lines |= {str(entry.location) for rank in at_end for entry in rank.passes if entry.location is not None}
    files = {path: file for rank in ranks for path, file in rank.files.items()}
    return EndingFacts(at_end, blocks_of_lines(lines, files, source))


def ranks_at_end(ranks: Sequence[RankTrace], ending: Ending, source: ProgramSource) -> list[RankAtEnd]:
    """Return line, last collectives and activity of each rank when the job stopped."""
    failures_by_rank = {failed.rank: failed for failed in failures_of(ranks, ending)}
    at_end = []
    for rank, log in zip(ranks, comparable_logs(ranks), strict=True):
        failure = failures_by_rank.get(rank.started.rank)
        exit_at, for_worker, waits_for = "", False, None
        stacks = ending.hang.stacks if ending.hang is not None else {}
        lines = program_lines(stacks.get(rank.started.rank, rank.stack))
        follows = failure is None or follows_from_another_rank(failure)
        if failure is not None:
            if failure.traceback:  # keep only lines of known program files
                raised_at = program_lines(failure.traceback)
                lines = tuple(line for line in raised_at if line.rpartition(":")[0] in rank.files)
                lines = lines or tuple(filter(None, [failure.location]))
            doing = describe_failure(failure)
            if failure.kind == "stuck" and rank.waits_for is not None:
                waits_for, doing = rank.waits_for, f"waits in {rank.waits_for}"
            log = _with_forward(log, failure, lines)
            if for_worker := region_of(main_stack(stacks.get(failure.rank, ""))) == WORKERS:
                doing = f"waits for a worker of its data loader{f' at {lines[0]}' if lines else ''}"
        elif rank.has_ended or rank.exit_call is not None:
            exit_at = _exit_text(rank, ending, source)
            verb = "raised" if exit_at.startswith(SYSTEM_EXIT) else "called"
            doing = f"has {verb} {exit_at}" if exit_at else "has run to its end"
            if exit_at == SYSTEM_EXIT and (places := source.ask(exits_raised, rank.files)):
                doing += f", as {join_names(list(map(str, places)), most=4)} may"
            for error in rank.thread_errors[-1:]:
                doing = f"raised {error.reply['type']} in a thread at {error.reply['location']}, and {doing}"
        elif lines and not waits_for_ranks(main_stack(rank.stack)):  # computing when ended
            doing, follows = f"was at work at {lines[0]}", False
        else:
            doing = f"was in {describe_call(log[-1])}" if log else "has reached no collective"
        if failure is not None and failure.kind != "stuck" and follows and log:
            doing = f"was in {describe_call(log[-1])}, until it {doing.partition(':')[0]}"
        first_call = max(watched.first_call for watched in ranks)
        ended = (rank.has_ended or rank.exit_call is not None) and (failure is None or failure.kind != "stuck")
        waits = follows and not (failure is not None and failure.kind == "stuck" and not is_waiting(failure))
        number, passes = rank.started.rank, rank.passes
        dump = stacks.get(number, "")
        in_threads = tuple(collectives_of_threads(dump)) if waits_for_ranks(main_stack(dump)) else ()
        fields = doing, lines, waits, ended, passes, exit_at, for_worker, rank.forwards, waits_for
        at_end.append(RankAtEnd(number, log, first_call, *fields, rank.is_constructing, in_threads))
    return at_end


def _exit_text(rank: RankTrace, ending: Ending, source: ProgramSource) -> str:
    """Return the exit call of a rank ("sys.exit at train.py:41"), or ""."""
    if rank.exit_call is None:
        return SYSTEM_EXIT if ending.exit_codes.get(rank.started.rank, 0) > 0 else ""  # only exit calls have such codes
    lines = rank.exit_call.lines
    if not lines and rank.exit_call.function == SYSTEM_EXIT:
        lines = tuple(map(str, source.ask(exits_raised, rank.files) or ()))
    if rank.exit_call.lines or len(lines) == 1:
        return f"{rank.exit_call.function} at {lines[0]}"
    return SYSTEM_EXIT if rank.exit_call.function == SYSTEM_EXIT else ""


def _with_forward(log: Sequence[Call], failure: RankFailure, lines: tuple[str, ...]) -> Sequence[Call]:
    """Add to `log` the DDP forward pass in which a rank waits, if unlogged."""
    backward_calls = [call for call in log if call.operation == DDP_BACKWARD]
    in_forward = failure.collective.startswith(FORWARD)
    if failure.kind == "raised" and follows_from_another_rank(failure):
        frames = traceback_stack(failure.traceback)
        in_forward = region_of(frames) == FORWARD and waits_for_ranks(frames)
    if not in_forward or not backward_calls or not lines or log[-1].operation == DDP_FORWARD:
        return log
    return [*log, replace(backward_calls[-1], operation=DDP_FORWARD, place="", location=lines[0], callers=lines)]


def failures_of(ranks: Sequence[RankTrace], ending: Ending) -> list[RankFailure]:
    """Return the failures of ranks, except ranks that torchrun ended after another failure."""
    failed, vanished = list[RankFailure](), list[RankFailure]()
    # SIGKILL of ranks that the script started itself; torchrun reports an exit code for its own
    is_killed = bool(ending.exit_code) and not ending.exit_codes and ending.hang is None
    for rank in ranks:
        number = rank.started.rank
        raised = entries_of(rank, RankRaised)
        code = ending.exit_codes.get(number)
        if ending.interrupted:
            failed.append(failures.failure_of_running_rank(number, 0.0, rank.stack, "", ""))
        elif raised:
            failed.append(failures.failure_of_exception(number, dict(raised[0].reply)))
        elif ending.hang is not None and number in ending.hang.stacks:
            stack = ending.hang.stacks[number]
            failed.append(failures.failure_of_running_rank(number, 0.0, stack, "", call_of_ddp(rank, stack)))
        elif code is not None and rank.exit_call is not None and rank.exit_call.handled is not None:
            failed.append(failures.failure_of_exception(number, dict(rank.exit_call.handled)))
        elif code is not None and not rank.has_ended:
            failed.append(_death_of(rank, code))
        elif is_killed and not (rank.has_ended or rank.exit_call is not None or rank.stack):  # left no word
            vanished.append(_with_last_call(failures.failure_without_trace(number), rank))
    if len(vanished) < len(ranks):  # if all ranks vanished, the first one is unknown
        failed = sorted([*failed, *vanished], key=lambda failure: failure.rank)
    if ending.hang is None and all(failure.kind == "died" and (failure.exit_code or 0) > 0 for failure in failed):
        return []  # the script ends its processes itself
    failed_ranks = {failure.rank for failure in failed}
    is_only_death = sum(failure.kind == "died" for failure in failed) == 1 and len(failed_ranks) == len(ranks)
    return [failure for failure in failed if not _was_ended_by_torchrun(failure, failed, is_only_death=is_only_death)]


def _death_of(rank: RankTrace, code: int) -> RankFailure:
    """Return the failure of a rank that ended by a signal or `os._exit`."""
    number = rank.started.rank
    dump = rank.stack if code < 0 else ""
    failure = _with_last_call(failures.failure_of_dead_rank(number, code, 0.0, dump=dump), rank)
    if code < 0 or rank.exit_call is None or not rank.exit_call.lines:
        return failure
    message = f"rank {number} called {rank.exit_call.function}, and ended with exit code {code}"
    return replace(failure, message=message, location=rank.exit_call.lines[0])


def _with_last_call(failure: RankFailure, rank: RankTrace) -> RankFailure:
    """Add the rank's last logged collective to a failure whose line is unknown."""
    if failure.location or not rank.calls:
        return failure
    return replace(failure, noticed=f"the last collective of rank {failure.rank} was {describe_call(rank.calls[-1])}")


def call_of_ddp(rank: RankTrace, stack: str) -> str:
    """Describe the DDP collective in which a rank waits; "" for other collectives."""
    operations = {"backward": DDP_BACKWARD, FORWARD: DDP_FORWARD}
    frames = main_stack(stack)
    region = region_of(frames)
    last = rank.calls[-1] if rank.calls else None
    if last is not None and last.operation == operations.get(region):
        return describe_call(last)
    if region not in (*operations, CONSTRUCTOR) or collective_of(frames):
        return ""
    if region != CONSTRUCTOR and not waits_for_ranks(frames):
        return ""
    lines = program_lines(stack)  # DDP does not log the sync of bucket order and initial weights
    return f"{region}{f' at {lines[0]}' if lines else ''}"


def still_in_a_call(ranks: Sequence[RankTrace], ending: Ending) -> set[int]:
    """Return the ranks whose last collective may not have completed."""
    killed_or_waiting = {failure.rank for failure in failures_of(ranks, ending) if follows_from_another_rank(failure)}
    return killed_or_waiting | {rank for rank, code in ending.exit_codes.items() if code < 0}


def timelines_of(
    ranks: Sequence[RankTrace], ending: Ending, findings: Sequence[Finding]
) -> tuple[CollectiveTimeline, ...]:
    """Return the last collectives of all ranks, if a rank failed or collectives diverged."""
    rank_failures = failures_of(ranks, ending)
    failed = {failure.rank: describe_failure(failure) for failure in rank_failures}
    local = {rank.started.rank for rank in ranks}
    diverged = any(mismatch_number(finding) is not None for finding in findings)
    if not (failed or diverged) or local != set(range(ranks[0].started.world_size)):  # other machines have no logs here
        return ()
    logs = comparable_logs(ranks)
    at_work = {failure.rank for failure in rank_failures if failure.kind == "stuck" and not is_waiting(failure)}
    waiting = {rank for rank in still_in_a_call(ranks, ending) - at_work if logs[rank]}
    open_calls = {(logs[rank][-1].group, rank) for rank in waiting}
    ended = {rank.started.rank for rank in ranks if rank.has_ended}
    result = make_timelines(logs, open_calls, dict.fromkeys(ended, "had finished") | failed, at_work)
    return result if ending.hang is not None else mismatched_timelines(result)


def _was_ended_by_torchrun(failure: RankFailure, failed: Sequence[RankFailure], *, is_only_death: bool) -> bool:
    """Return True if torchrun ended a rank after the failure of another rank.

    `is_only_death`: only one rank died, so lost connections on other ranks show that the dead rank failed first.
    """
    killed = [item for item in failed if item.kind == "died" and item.exit_code in (-9, None)]
    not_ended = [item for item in failed if item not in killed and item.exit_code != -15]
    if failure in killed:  # a killed rank may also be the first failure, which breaks the connections of the others
        return any(not follows_from_another_rank(item) for item in not_ended)
    if not_ended and is_only_death and all(map(failures.lost_connection, not_ended)):
        return False
    return failure.exit_code == -15 and len(not_ended) + len(killed) > 0
