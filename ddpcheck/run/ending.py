"""Find the cause of failed or hung ranks from exit codes and stacks."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import SYSTEM_EXIT, Joining, RankAtEnd
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import CollectiveTimeline
from ddpcheck.findings.program_blocks import Block, ProgramSource, blocks_of_lines
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
    own_stack,
    program_lines,
    program_threads,
    region_of,
    traceback_stack,
    waits_for_others,
)
from ddpcheck.findings.wording import format_ranks, join_names
from ddpcheck.rules.collectives.ddp401_rank_raised import judge_unmet
from ddpcheck.rules.collectives.ddp402_hang import judge_meeting
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_collectives
from ddpcheck.rules.collectives.diagnose import judge_endings
from ddpcheck.rules.collectives.first_divergence import first_divergence
from ddpcheck.rules.collectives.rank_failure import (
    follows_from_another_rank,
    judge_failure,
    judge_left_by_thread,
    judge_threads,
    judge_torch_errors,
    told_of_threads,
)
from ddpcheck.rules.collectives.timelines import diverging_calls, timelines
from ddpcheck.run.hang_watch import Hang, Unended
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, RankRaised, lines_in
from ddpcheck.stream.rank_log import WatchedRank, comparable_logs
from ddpcheck.trace.collectives import EndedThread
from ddpcheck.trace.failures import RaisedFacts, describe_failure
from ddpcheck.trace.positions import described_call, lines_of
from ddpcheck.worlds import failures

_TOLD_AS_STORY = ("DDP401", "DDP402", "DDP403")  # if no rank failed on its own


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a script: exit codes, signals and hangs of its ranks."""

    exit_code: int = 0  # of the whole script
    # exit codes of the failed ranks, by rank; negative for a signal
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    hang: Hang | None = None  # None if no hang was detected
    interrupted: bool = False  # True if a signal of a user or scheduler ended the script
    unended: Unended | None = None  # ranks that finished the script but did not exit
    # processes still in `init_process_group`, if one raised there and none joined a group
    unmet: tuple[Joining, ...] = ()
    unwatched: tuple[str, ...] = ()  # reasons why ranks are not watched, one sentence each
    restart: int = 0  # number of restarts by torchrun
    # activity by rank if the script is still running, such as "is at train.py:12"
    doing: Mapping[int, str] = field(default_factory=dict)


def judge_ending(
    ranks: Sequence[WatchedRank], ending: Ending, known: Sequence[Finding], source: ProgramSource | None = None
) -> list[Finding]:
    """Return DDP401 to 404 unless a `known` finding explains the failed ranks."""
    source = source or ProgramSource()
    if ending.hang is not None and ending.hang.joining:
        return judge_meeting(ending.hang.joining, ending.hang.seconds)
    if not ranks:
        return judge_unmet(ending.unmet)
    known = [finding for finding in known if finding.severity is Severity.ERROR and RULES[finding.code].stops_run]
    failed = failures_of(ranks, ending)
    if [rank.started.rank for rank in ranks] != list(range(ranks[0].started.world_size)):
        return []  # ranks on other machines have no log here
    if not failed:
        return [] if known else _judge_silent_mismatch(ranks, ending, source)
    threads = _ended_threads(ranks, ending)
    if (ending.hang is not None or ending.interrupted) and (result := judge_threads(threads, failed, len(ranks))):
        return result
    evidence = told_of_threads(threads)
    for rank, dump in ({} if ending.hang is None else ending.hang.stacks).items():
        evidence += [f"another thread of rank {rank} waits in {call}" for call in collectives_of_threads(dump)]
    judged = _judge_failures(ranks, ending, known, failed, source)
    if findings := [cause for finding in judged for cause in judge_left_by_thread(threads, finding)]:
        return findings
    return [replace(finding, evidence=(*finding.evidence, *evidence)) for finding in judged]


def _judge_failures(
    ranks: Sequence[WatchedRank],
    ending: Ending,
    known: Sequence[Finding],
    rank_failures: Sequence[RankFailure],
    source: ProgramSource,
) -> list[Finding]:
    ordered = failures.in_order(rank_failures)
    constructs = {rank.started.rank for rank in ranks if rank.constructs}  # the DDP constructor raises on mismatches
    if known and all(follows_from_another_rank(failure) or failure.rank in constructs for failure in ordered):
        return []
    if any("mp_policy" in finding.subjects for finding in known) and all(map(_is_of_gloo, ordered)):
        return []
    if not ending.interrupted and (raised := judge_torch_errors(_raised_facts(ranks, ordered, source))):
        seen = {(finding.code, key) for finding in known for key in (finding.location, finding.subjects)}
        return [item for item in raised if seen.isdisjoint({(item.code, item.location), (item.code, item.subjects)})]
    failed = {failure.rank for failure in ordered}
    finished = [rank.started.rank for rank in ranks if rank.has_ended and rank.started.rank not in failed]
    judged = judge_failure(ordered, comparable_logs(ranks), len(ranks), finished)
    if ending.interrupted:
        judged = [finding for finding in judged if finding.code == "DDP403"]
    by_itself = judged and judged[0].code == "DDP401" and not follows_from_another_rank(ordered[0])
    is_story = judged and judged[0].code in _TOLD_AS_STORY and not by_itself
    story = _story(ranks, ending, judged, source) if is_story else []
    return story or [_with_option_of_run(finding) for finding in judged]


def _ended_threads(ranks: Sequence[WatchedRank], ending: Ending) -> list[EndedThread]:
    threads = []
    for rank in ranks:
        dump = rank.stack if ending.hang is None else ending.hang.stacks.get(rank.started.rank, "")
        lock = "" if program_threads(dump) else lock_waited_for(own_stack(dump))
        for error in rank.thread_errors:
            threads.append(EndedThread(error.thread, failures.raised(rank.started.rank, dict(error.reply)), lock))
    return threads


def _is_of_gloo(failure: RankFailure) -> bool:
    """Return True if a failure can follow from gloo tensors with mismatched sizes."""
    return follows_from_another_rank(failure) or failure.exit_code == -signal.SIGABRT or "gloo" in failure.message


def _raised_facts(ranks: Sequence[WatchedRank], ordered: Sequence[RankFailure], source: ProgramSource) -> RaisedFacts:
    first = next(rank for rank in ranks if rank.started.rank == ordered[0].rank)
    failed = {failure.rank for failure in ordered}
    at_work = {}
    for rank in ranks:
        stack = own_stack(rank.stack)
        if rank.started.rank not in failed and not rank.has_ended and stack and not waits_for_others(stack):
            locs = program_lines(rank.stack)
            at_work[rank.started.rank] = [loc for loc in locs if loc.rpartition(":")[0] in first.files] or list(locs)
    return RaisedFacts(
        ordered,
        comparable_logs(ranks),
        [entry for entry in first.entries if isinstance(entry, WrapperBegun)],
        {rank: lines for rank, lines in at_work.items() if lines},
        source.ask(call_of, _CHECKPOINTS, first.files),
        [entry for entry in first.entries if isinstance(entry, ModuleChanged) and entry.what == "replaced"],
        [wrapper for wrapper in first.wrappers if wrapper.context.sharded is not None],
        next((entry.reply.get("clipped", ()) for entry in first.entries if isinstance(entry, RankRaised)), ()),
    )


_CHECKPOINTS = ("checkpoint", "checkpoint_sequential", "gradient_checkpointing_enable")


def _with_option_of_run(finding: Finding) -> Finding:
    advice = finding.what_to_do.replace("--timeout", "--check-timeout").replace(", --world-size 2", "")
    return finding if advice == finding.what_to_do else replace(finding, fix=advice)


def _story(
    ranks: Sequence[WatchedRank], ending: Ending, judged: Sequence[Finding], source: ProgramSource
) -> list[Finding]:
    at_end = ranks_at_end(ranks, ending, source)
    messages = [finding.message for finding in judged if finding.code == "DDP403"][:1]
    return [
        replace(story, evidence=(*filter(None, story.evidence), *messages), tags=(*story.tags, *judged[0].tags))
        for story in judge_endings(at_end, _blocks(ranks, at_end, source))
    ]


def ranks_at_end(ranks: Sequence[WatchedRank], ending: Ending, source: ProgramSource) -> list[RankAtEnd]:
    """Return the position of each rank when the job stopped."""
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
            if for_worker := region_of(own_stack(stacks.get(failure.rank, ""))) == WORKERS:
                doing = f"waits for a worker of its data loader{f' at {lines[0]}' if lines else ''}"
        elif rank.has_ended or rank.exit is not None:
            exit_at = _exit_of(rank, ending, source)
            verb = "raised" if exit_at.startswith(SYSTEM_EXIT) else "called"
            doing = f"has {verb} {exit_at}" if exit_at else "has run to its end"
            if exit_at == SYSTEM_EXIT and (places := source.ask(exits_raised, rank.files)):
                doing += f", as {join_names(list(map(str, places)), most=4)} may"
            for error in rank.thread_errors[-1:]:
                doing = f"raised {error.reply['type']} in a thread at {error.reply['location']}, and {doing}"
        elif lines and not waits_for_others(own_stack(rank.stack)):  # computing when ended
            doing, follows = f"was at work at {lines[0]}", False
        else:
            doing = f"was in {described_call(log[-1])}" if log else "has reached no collective"
        if failure is not None and failure.kind != "stuck" and follows and log:
            doing = f"was in {described_call(log[-1])}, until it {doing.partition(':')[0]}"
        first_call = max(watched.first_call for watched in ranks)
        ended = (rank.has_ended or rank.exit is not None) and (failure is None or failure.kind != "stuck")
        waits = follows and not (failure is not None and failure.kind == "stuck" and not is_waiting(failure))
        number, passes = rank.started.rank, rank.passes
        dump = stacks.get(number, "")
        in_threads = tuple(collectives_of_threads(dump)) if waits_for_others(own_stack(dump)) else ()
        fields = (doing, lines, waits, ended, passes, exit_at, for_worker, rank.forwards, waits_for, rank.constructs)
        at_end.append(RankAtEnd(number, log, first_call, *fields, in_threads))
    return at_end


def _exit_of(rank: WatchedRank, ending: Ending, source: ProgramSource) -> str:
    """Return the exit call of a rank ("sys.exit at train.py:41"), or ""."""
    if rank.exit is None:
        return SYSTEM_EXIT if ending.exit_codes.get(rank.started.rank, 0) > 0 else ""  # only exit calls have such codes
    lines = rank.exit.lines
    if not lines and rank.exit.function == SYSTEM_EXIT:
        lines = tuple(map(str, source.ask(exits_raised, rank.files) or ()))
    if rank.exit.lines or len(lines) == 1:
        return f"{rank.exit.function} at {lines[0]}"
    return SYSTEM_EXIT if rank.exit.function == SYSTEM_EXIT else ""


def _with_forward(log: Sequence[Call], failure: RankFailure, lines: tuple[str, ...]) -> Sequence[Call]:
    """Append an unlogged DDP forward pass in which a rank waits."""
    backward_calls = [call for call in log if call.operation == DDP_BACKWARD]
    in_forward = failure.collective.startswith(FORWARD)
    if failure.kind == "raised" and follows_from_another_rank(failure):
        frames = traceback_stack(failure.traceback)
        in_forward = region_of(frames) == FORWARD and waits_for_others(frames)
    if not in_forward or not backward_calls or not lines or log[-1].operation == DDP_FORWARD:
        return log
    return [*log, replace(backward_calls[-1], operation=DDP_FORWARD, place="", location=lines[0], callers=lines)]


def _blocks(
    ranks: Sequence[WatchedRank], at_end: Sequence[RankAtEnd], source: ProgramSource
) -> dict[str, tuple[Block, ...]]:
    lines = {line for rank in at_end for call in rank.calls for line in (*lines_of(call), *lines_in(call.place))}
    lines |= {line for rank in at_end for line in rank.lines}
    lines |= {str(entry.location) for rank in at_end for entry in rank.passes if entry.location is not None}
    return blocks_of_lines(lines, {path: file for rank in ranks for path, file in rank.files.items()}, source)


def _judge_silent_mismatch(ranks: Sequence[WatchedRank], ending: Ending, source: ProgramSource) -> list[Finding]:
    """Return DDP403 if no rank raised: the script finished, or gloo aborted on mismatched tensor sizes."""
    unfinished = [rank.started.rank for rank in ranks if not rank.has_ended]
    if bool(unfinished) != bool(ending.exit_code):
        return []
    how = "no rank failed, although calls do not match: they have the same size, do not wait, or their error was caught"
    if unfinished:
        how = f"{format_ranks(unfinished)} ended without a Python exception"
    findings = judge_collectives(comparable_logs(ranks), unfinished)
    findings = (findings and _story(ranks, Ending(), findings, source)) or findings
    return [replace(finding, evidence=(*finding.evidence, how)) for finding in findings]


def failures_of(ranks: Sequence[WatchedRank], ending: Ending) -> list[RankFailure]:
    """Return the failures of the ranks, without the ranks that torchrun ended."""
    failed, vanished = list[RankFailure](), list[RankFailure]()
    for rank in ranks:
        number = rank.started.rank
        raised = [entry for entry in rank.entries if isinstance(entry, RankRaised)]
        code = ending.exit_codes.get(number)
        if ending.interrupted:
            failed.append(failures.stuck(number, 0.0, rank.stack, "", ""))
        elif raised:
            failed.append(failures.raised(number, dict(raised[0].reply)))
        elif ending.hang is not None and number in ending.hang.stacks:
            stack = ending.hang.stacks[number]
            failed.append(failures.stuck(number, 0.0, stack, "", call_of_ddp(rank, stack)))
        elif code is not None and rank.exit is not None and rank.exit.handled is not None:
            failed.append(failures.raised(number, dict(rank.exit.handled)))
        elif code is not None and not rank.has_ended:
            failed.append(_died(rank, code))
        elif ending.exit_code and not ending.exit_codes and ending.hang is None:  # the script started the ranks itself
            if not rank.has_ended and rank.exit is None and not rank.stack:  # as by SIGKILL
                vanished.append(_with_last_call(failures.vanished(number), rank))
    if len(vanished) < len(ranks):  # if all ranks vanished, the first one is unknown
        failed = sorted([*failed, *vanished], key=lambda failure: failure.rank)
    if ending.hang is None and all(failure.kind == "died" and (failure.exit_code or 0) > 0 for failure in failed):
        return []  # the script ends its processes itself
    failed_ranks = {failure.rank for failure in failed}
    only_one_died = sum(failure.kind == "died" for failure in failed) == 1 and len(failed_ranks) == len(ranks)
    return [failure for failure in failed if not _was_ended(failure, failed, only_one_died=only_one_died)]


def _died(rank: WatchedRank, code: int) -> RankFailure:
    """Return the failure of a rank that ended by a signal or `os._exit`."""
    number = rank.started.rank
    failure = _with_last_call(failures.died(number, code, 0.0, dump=rank.stack if code < 0 else ""), rank)
    if code < 0 or rank.exit is None or not rank.exit.lines:
        return failure
    message = f"rank {number} called {rank.exit.function}, and ended with exit code {code}"
    return replace(failure, message=message, location=rank.exit.lines[0])


def _with_last_call(failure: RankFailure, rank: WatchedRank) -> RankFailure:
    if failure.location or not rank.calls:
        return failure
    return replace(failure, noticed=f"the last collective of rank {failure.rank} was {described_call(rank.calls[-1])}")


def call_of_ddp(rank: WatchedRank, stack: str) -> str:
    """Describe the DDP collective in which a rank waits; "" for other collectives."""
    operations = {"backward": DDP_BACKWARD, FORWARD: DDP_FORWARD}
    frames = own_stack(stack)
    region = region_of(frames)
    last = rank.calls[-1] if rank.calls else None
    if last is not None and last.operation == operations.get(region):
        return described_call(last)
    if region not in (*operations, CONSTRUCTOR) or collective_of(frames):
        return ""
    if region != CONSTRUCTOR and not waits_for_others(frames):
        return ""
    lines = program_lines(stack)  # DDP does not log the sync of bucket order and initial weights
    return f"{region}{f' at {lines[0]}' if lines else ''}"


def still_in_a_call(ranks: Sequence[WatchedRank], ending: Ending) -> set[int]:
    """Return the ranks whose last collective is not known to have completed."""
    killed_or_waiting = {failure.rank for failure in failures_of(ranks, ending) if follows_from_another_rank(failure)}
    return killed_or_waiting | {rank for rank, code in ending.exit_codes.items() if code < 0}


def timelines_of(
    ranks: Sequence[WatchedRank], ending: Ending, findings: Sequence[Finding]
) -> tuple[CollectiveTimeline, ...]:
    """Return the last collectives of the ranks if some ranks failed or diverged."""
    rank_failures = failures_of(ranks, ending)
    failed = {failure.rank: describe_failure(failure) for failure in rank_failures}
    local = {rank.started.rank for rank in ranks}
    parted = any(first_divergence(finding) is not None for finding in findings)
    if not (failed or parted) or local != set(range(ranks[0].started.world_size)):  # other machines have no logs here
        return ()
    logs = comparable_logs(ranks)
    at_work = {failure.rank for failure in rank_failures if failure.kind == "stuck" and not is_waiting(failure)}
    waiting = {rank for rank in still_in_a_call(ranks, ending) - at_work if logs[rank]}
    open_calls = {(logs[rank][-1].group, rank) for rank in waiting}
    ended = {rank.started.rank for rank in ranks if rank.has_ended}
    result = timelines(logs, open_calls, dict.fromkeys(ended, "had finished") | failed, at_work)
    return result if ending.hang is not None else diverging_calls(result)


def _was_ended(failure: RankFailure, rank_failures: Sequence[RankFailure], *, only_one_died: bool) -> bool:
    """Return True if torchrun ended a rank after the failure of another rank."""
    killed = [other for other in rank_failures if other.kind == "died" and other.exit_code in (-9, None)]
    others = [other for other in rank_failures if other not in killed and other.exit_code != -15]
    if failure in killed:  # a killed rank may also be the first failure, which breaks the connections of the others
        return any(not follows_from_another_rank(other) for other in others)
    if others and only_one_died and all(map(failures.looks_fallen, others)):
        return False  # their lost connections point to the dead rank as the first failure
    return failure.exit_code == -15 and len(others) + len(killed) > 0
