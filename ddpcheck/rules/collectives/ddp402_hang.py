"""DDP402 hang: error, keeps_gradients, keeps_results

Ranks wait for something that never arrives.

Why: A collective ends when every rank has entered it. A rank may take a different branch, wait for a lock, loop or be
    slow. The others then wait until the process group's timeout: 30 minutes by default, 10 with nccl. (PyTorch docs,
    init_process_group, timeout.)
Fix: Compare the places and stacks of the ranks, and bring the rank that is elsewhere into the same collective; if a
    rank is working and only slow, give it more time (--timeout).
Detected: DDP402 is reported if no rank has failed and some ranks do not finish in time. ddpcheck compares the Python
    stacks of the ranks and their logs of collectives. Ranks that wait for no other rank are named as the cause. If
    ranks wait in init_process_group, `ddpcheck run` compares the rank, world size and address of each. `ddpcheck
    hang` reads Flight Recorder dumps, and finds out which rank waits for which in all process groups. It names the
    rank for which the others wait. It also says why: this rank stopped calling collectives, came late, left no dump,
    or its GPU has not completed a collective that others have completed.
Ignore: If the rank is only slow. Give it more time with --timeout or --check-timeout.
Checks: run collectives
Reports: Lightning-AI/pytorch-lightning#10947
Example:
    if dist.get_rank() == 0:
        dist.barrier()                       # right: outside the condition, on every rank
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import Joining, PeerWait, RankAtEnd, RecordedCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import (
    agreeing,
    capitalized,
    counted,
    format_ranks,
    group_by,
    join_names,
    one_finding,
    plural_verb,
    unless_all,
)
from ddpcheck.trace.failures import (
    RENDEZVOUS_SUBJECT,
    TIMEOUT_PATTERN,
    FailureFacts,
    RaisedFacts,
    describe_failure,
    process_name,
    stack_lines,
)
from ddpcheck.trace.positions import SEND_ORDER, EndingFacts, Position, calls_there, doing
from ddpcheck.trace.wait_graph import WaitGraph, first_lines


def judge_meeting(waiting: Sequence[Joining], seconds: float) -> list[Finding]:
    """DDP402: reason for an incomplete rendezvous, from the arguments of each process."""
    if not waiting:
        return []
    message, fix, ranks = _reason(waiting)
    states = [
        f"{process_name(p)} {'waited' if p.error else 'waits'} at {p.address}, world size {p.world_size}"
        f"{f', and raised {p.error}' if p.error else ''}"
        for p in waiting[:8]
    ]
    first = next((p for p in waiting if p.rank in ranks), waiting[0])
    return one_finding(
        "DDP402",
        RENDEZVOUS_SUBJECT,
        message,
        ranks=ranks,
        location=Location.parse(first.location),
        evidence=[*states, f"none of them has made progress for {seconds:.0f} s" if seconds else ""],
        fix=fix,
    )


def _reason(waiting: Sequence[Joining]) -> tuple[str, str, tuple[int, ...]]:
    """Return the message, the fix and the ranks that differ."""
    numbers = [p.rank for p in waiting]
    for noun, values, fix in (
        ("world sizes", {p.rank: p.world_size for p in waiting}, "Pass the same world_size on every rank."),
        (
            "addresses",
            {p.rank: p.address for p in waiting},
            "Pass the same init_method, or set the same MASTER_ADDR and MASTER_PORT, on every rank; if the port is "
            "chosen at run time, one process chooses it before it starts the others.",
        ),
    ):
        groups = group_by(values, values.__getitem__)
        if len(groups) > 1:
            groups_in_words = ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())
            message = f"Processes wait in init_process_group with different {noun}: {groups_in_words}."
            fewest, second_fewest, *_ = sorted(groups.values(), key=len)
            return message, fix, tuple(fewest) if len(fewest) < len(second_fewest) else ()
    size, address, agent = waiting[0].world_size, waiting[0].address, waiting[0].agent
    if twice := sorted({rank for rank in numbers if numbers.count(rank) > 1}):
        missing = sorted(set(range(size)) - set(numbers))
        nobody = f", and none is {format_ranks(missing)}" if missing else ""
        return (
            f"{numbers.count(twice[0])} processes say in init_process_group that they are rank {twice[0]}{nobody}.",
            'Give each process a different rank: under torchrun int(os.environ["RANK"]), not LOCAL_RANK.',
            tuple(twice),
        )
    if missing := sorted(set(range(size)) - set(numbers)):
        wait = plural_verb("waits", "wait", waiting)
        return (
            f"{counted(len(waiting), 'process')} {wait} in init_process_group, and the world size is {size}: "
            f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} missing.",
            "Call init_process_group in every process, and start as many as world_size says; or leave world_size and "
            "rank out: torchrun sets them.",
            (),
        )
    if agent and address not in (agent, f"tcp://{agent}"):
        return (
            f"All ranks wait in init_process_group for a store at {address}, but no rank starts one there: under "
            f"torchrun, ranks use the store of its agent, at {agent}.",
            "Leave init_method, rank and world_size out, or pass init_method='env://': torchrun sets the address.",
            (),
        )
    return (
        f"All {counted(len(waiting), 'rank')} wait in init_process_group, and do not meet at {address}.",
        "Check that rank 0 can serve that address and that the others can reach it: host name, port, firewall, and the "
        "network interface (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME).",
        (),
    )


def explain_by_hang(facts: FailureFacts) -> list[Finding]:
    """DDP402: hang without a failed rank; blames ranks that do not wait for others."""
    stuck = facts.stuck
    if facts.ended:
        return []
    busy = [f for f in stuck if not is_waiting(f)] or [f for f in stuck if not f.collective]
    lead = (busy or stuck or list(facts.failures))[0]
    ranks = format_ranks(failure.rank for failure in stuck)
    return one_finding(
        "DDP402",
        (lead.place or "run",),
        f"{ranks.capitalize()} did not finish {lead.place or 'the run'}: {_all_or_one(stuck, lead)}.",
        ranks=unless_all([failure.rank for failure in busy or stuck], facts.world_size),
        location=Location.parse(lead.location),
        evidence=[*facts.evidence, *stack_lines(stuck)],
        fix=_fix_of_hang(stuck, lead),
    )


_BEFORE_THE_FIRST_STEP = ("starting up", "loading the target", "building the model")


def _fix_of_hang(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    """Return the fix for a hang, or '' if all ranks wait."""
    busy = [failure.rank for failure in stuck if not is_waiting(failure)]
    if not busy:
        return ""
    longer = "give it more time with --timeout"
    if lead.place in _BEFORE_THE_FIRST_STEP:
        return (
            f"If it is slow there, {longer}, and import modules that take long once with --preload; if it waits there "
            "for input, a lock or a download, take that out."
        )
    if len(busy) == len(stuck):
        return f"No rank waits for another: end the loop or the wait at that place, or, if it is only slow, {longer}."
    return (
        f"The others wait for {format_ranks(busy)}: end the loop or the wait at that place, and reach the collective "
        f"that the others are in; if it is only slow, {longer}."
    )


def _all_or_one(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    """Describe what all stuck ranks do, or only `lead` if the ranks differ."""
    text = describe_failure(lead)
    if len(stuck) > 1 and all(describe_failure(failure) == text for failure in stuck):
        return f"all {agreeing(text, [failure.rank for failure in stuck])}"
    return f"rank {lead.rank} {text}" if len(stuck) > 1 else text


_PARTNER = "Let every send have its recv on the other rank: of the same two ranks, group and tag, in the same order."


def missing_peer_finding(
    by_rank: dict[int, RankAtEnd], ranks: Sequence[int], waits: Sequence[PeerWait], suffix: str
) -> list[Finding]:
    is_same_direction = len({wait.sends for wait in waits}) == 1 and len(waits) > 1
    return one_finding(
        "DDP402",
        tuple(dict.fromkeys(wait.operation for wait in waits)),
        f"{capitalized(join_names([f'rank {number} {by_rank[number].doing}' for number in ranks], most=8))}{suffix}.",
        ranks=ranks if len(ranks) < len(by_rank) else (),
        location=Location.parse(waits[0].location),
        fix=SEND_ORDER if is_same_direction else _PARTNER,
    )


def explain_by_work(facts: EndingFacts, running: Position, waiting: Position) -> list[Finding]:
    """DDP402: running rank that others wait for; its next call is unknown."""
    if not running.is_at_work:
        return []
    busy = [rank.rank for rank in facts.ranks if not rank.waits and not rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.waits]
    return one_finding(
        "DDP402",
        ("work",),
        f"{capitalized(doing(facts, busy))}, and {format_ranks(others)} {plural_verb('waits', 'wait', others)} for it: "
        f"{doing(facts, others)}.",
        ranks=busy,
        location=Location.parse(running.lines[0]) if running.lines else None,
        evidence=calls_there(running, waiting),
        fix="The worker waits for a lock that is never released, as happens if a process is forked while a thread "
        "holds it. Create locks, files and clients in the worker and not before, or give the loader "
        'multiprocessing_context="forkserver"; num_workers=0 shows if this is the cause.'
        if running.of.for_worker
        else "If the work there takes long, give the others more time: init_process_group(timeout=...). If not, end "
        "the wait or the loop there, so that this rank reaches the collective that the others wait in.",
    )


def explain_timeout(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP402: process group timeout while waiting for a rank that was running."""
    waited = [f.rank for f in facts.failures if re.search(TIMEOUT_PATTERN, f"{f.message}\n{f.traceback}")]
    log = facts.logs[facts.first.rank]
    late = [rank for rank in range(len(facts.logs)) if rank not in waited and facts.first.rank != rank]
    if not log or not late or any(not _is_behind(facts.logs[rank], log) for rank in late):
        return []
    arrived = {f.rank: f for f in facts.failures if f.rank in late}
    if any(len(facts.logs[rank]) < len(log) if rank in arrived else rank not in facts.at_work for rank in late):
        return []  # the late rank waits or failed elsewhere
    rank, call = late[0], log[-1]
    milliseconds = next((int(n) for n in re.search(TIMEOUT_PATTERN, text).groups() if n), 0)  # type: ignore[union-attr]
    limit = f" of {milliseconds / 1000:g} s" if milliseconds else ""
    of_group, where_set = " of the process group", "init_process_group"
    if call.operation == "monitored_barrier":
        of_group, where_set = "", call.operation
    lines = facts.at_work.get(rank, ())
    where = Location.parse(lines[0]) if lines else None
    state = f"was still at work at {lines[0]}" if lines else ""
    if rank in arrived:
        before = facts.logs[rank][-2:-1]
        since = f" after {before[0].operation} at {before[0].location}" if before else ""
        delay = arrived[rank].when - facts.first.when
        state = f"came to it {max(delay, 0.0):.0f} s after that, and was at work{since} until then"
        where = Location.parse(before[0].location if before else call.location)
    return facts.one_finding(
        "DDP402",
        (call.operation,),
        f"{format_ranks(waited).capitalize()} waited in {call.operation} at {call.location} for longer than the "
        f"timeout{limit}{of_group}, and {format_ranks(late)} {state}.",
        ranks=unless_all(late, len(facts.logs)),
        location=where,
        evidence=[
            *(f"{format_ranks([r])} was at {' called from '.join(stack[:4])}" for r, stack in facts.at_work.items()),
            f"{format_ranks(waited)} and {format_ranks(late)} have reached the same {counted(len(log), 'collective')}",
            facts.first.message,
        ],
        fix=f"Give the others that time: {where_set}(timeout=...) longer than what {format_ranks(late)} "
        f"{plural_verb('does', 'do', late)} there; or split the work over all ranks; or do it outside of training.",
    )


def _is_behind(log: Sequence[Call], other_log: Sequence[Call]) -> bool:
    """Return True if a log equals `other_log`, or lacks only its last call."""
    is_prefix = [(c.operation, c.group) for c in log] == [(c.operation, c.group) for c in other_log[: len(log)]]
    return is_prefix and len(other_log) - 1 <= len(log) <= len(other_log)


def hang_finding(
    graph: WaitGraph,
    roots: Sequence[int],
    cause: str,
    fix: str,
    evidence: Sequence[str] = (),
    call: RecordedCall | None = None,
    code: str = "DDP402",
) -> list[Finding]:
    """Create a finding on `roots`, located at `call` or a waiting call."""
    lines, waiting = graph.who_waits(roots)
    calls = [call] if call is not None else [call for _, call, _ in graph.waits_for(roots)]
    others = "the other " if len(waiting) + len(roots) == len(graph.dumps.keys() | graph.missing) else ""
    who = f"{others}{len(waiting)} ranks wait" if len(waiting) > 1 else f"{format_ranks(waiting)} waits"
    return one_finding(
        code,
        sorted({call.call.operation.partition(" ")[0] for call in calls}),
        f"{capitalized(cause)}{f', and {who} for that' if waiting else ''}.",
        ranks=roots,
        location=Location.parse(next((call.call.location for call in calls if call.call.location), "")),
        evidence=[*first_lines(evidence), *lines],
        fix=fix,
    )
