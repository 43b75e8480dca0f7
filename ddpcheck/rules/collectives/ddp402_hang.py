"""DDP402 hang: error, ends_run, keeps_gradients, keeps_results

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
Line: The line at which the rank that others wait for is. For a send or recv without a partner, and in Flight Recorder
    dumps, the call that waits. In init_process_group, the call of a process that differs from the others.
Checks: run collectives; repro progress
Reports: Lightning-AI/pytorch-lightning#10947
Example:
    if dist.get_rank() == 0:
        dist.barrier()                       # right: outside the condition, on every rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import Joining, PeerWait, RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.stacks import is_waiting
from ddpcheck.findings.wording import (
    capitalized,
    format_by_text,
    format_ranks,
    group_by,
    join_names,
    new_finding,
    plural,
    plural_verb,
    pluralize_verb,
    ranks_or_all,
)
from ddpcheck.trace.failures import TIMEOUT_PATTERN, FailureFacts, describe_failure, process_name, stack_lines
from ddpcheck.trace.positions import SEND_ORDER, EndingFacts, Position, describe_ranks, divergence_evidence
from ddpcheck.trace.wait_graph import WaitGraph


def judge_rendezvous(waiting: Sequence[Joining], seconds: float) -> list[Finding]:
    """DDP402: processes that wait for each other in `init_process_group`, explained by their arguments."""
    if not waiting:
        return []
    message, fix, ranks = _explain_rendezvous(waiting)
    states = [
        f"{process_name(p)} {'waited' if p.error else 'waits'} at {p.address}, world size {p.world_size}"
        f"{f', and raised {p.error}' if p.error else ''}"
        for p in waiting[:8]
    ]
    first = next((p for p in waiting if p.rank in ranks), waiting[0])
    return new_finding(
        "DDP402",
        ("init_process_group",),
        message,
        ranks=ranks,
        location=Location.parse(first.location),
        evidence=[*states, f"none of them has made progress for {seconds:.0f} s" if seconds else ""],
        fix=fix,
    )


def _explain_rendezvous(waiting: Sequence[Joining]) -> tuple[str, str, tuple[int, ...]]:
    """Return why processes wait: a message, its fix, and ranks at fault, if known."""
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
            f"{plural(len(waiting), 'process')} {wait} in init_process_group, and the world size is {size}: "
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
        f"All {plural(len(waiting), 'rank')} wait in init_process_group, and do not meet at {address}.",
        "Check that rank 0 can serve that address and that the others can reach it: host name, port, firewall, and the "
        "network interface (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME).",
        (),
    )


def explain_by_hang(facts: FailureFacts) -> list[Finding]:
    """DDP402: hang without a failure, reported on ranks that do not wait, if any."""
    stuck = facts.stuck
    if facts.ended or facts.interrupted:
        return []
    busy = [f for f in stuck if not is_waiting(f)] or [f for f in stuck if not f.collective]
    lead = (busy or stuck or list(facts.failures))[0]
    ranks = [failure.rank for failure in stuck]
    state = describe_failure(lead)
    if len(stuck) > 1:
        is_same = all(describe_failure(failure) == state for failure in stuck)
        state = f"all {pluralize_verb(state, ranks)}" if is_same else f"rank {lead.rank} {state}"
    return new_finding(
        "DDP402",
        (lead.place or "run",),
        f"{format_ranks(ranks).capitalize()} did not finish {lead.place or 'the run'}: {state}.",
        ranks=ranks_or_all([failure.rank for failure in busy or stuck], len(facts.logs)),
        location=Location.parse(lead.location),
        evidence=[*facts.evidence, *stack_lines(stuck)],
        fix=_fix_of_hang(stuck, lead),
    )


_PHASES_BEFORE_STEPS = ("starting up", "loading the target", "building the model")


def _fix_of_hang(stuck: Sequence[RankFailure], lead: RankFailure) -> str:
    busy = [failure.rank for failure in stuck if not is_waiting(failure)]
    if not busy:
        return ""
    longer = "give it more time with --timeout"
    if lead.place in _PHASES_BEFORE_STEPS:
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


_PAIR_FIX = "Let every send have its recv on the other rank: of the same two ranks, group and tag, in the same order."


def judge_circle(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP402: circular wait of ranks in sends and receives, outside of collectives. Runs first."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        circle = [rank.rank]
        while (wait := by_rank[circle[-1]].waits_for) is not None and wait.peer in by_rank and wait.peer not in circle:
            circle.append(wait.peer)
        waits = [wait for number in circle if (wait := by_rank[number].waits_for) is not None]
        if len(waits) == len(circle) > 1 and waits[-1].peer == rank.rank:
            return missing_peer_finding(by_rank, circle, waits, ": each waits for the next one")
    return []


def judge_missing_peer(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP402: send or recv whose peer rank waits in neither of them."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        wait = rank.waits_for
        if wait is not None and wait.peer in by_rank and by_rank[wait.peer].waits_for is None:
            return missing_peer_finding(by_rank, [rank.rank, wait.peer], [wait], "")
    return []


def missing_peer_finding(
    by_rank: dict[int, RankAtEnd], ranks: Sequence[int], waits: Sequence[PeerWait], suffix: str
) -> list[Finding]:
    is_same_direction = len({wait.sends for wait in waits}) == 1 and len(waits) > 1
    return new_finding(
        "DDP402",
        tuple(dict.fromkeys(wait.operation for wait in waits)),
        f"{capitalized(join_names([f'rank {number} {by_rank[number].doing}' for number in ranks], most=8))}{suffix}.",
        ranks=ranks if len(ranks) < len(by_rank) else (),
        location=Location.parse(waits[0].location),
        fix=SEND_ORDER if is_same_direction else _PAIR_FIX,
    )


def explain_by_work(facts: EndingFacts, running: Position, waiting: Position) -> list[Finding]:
    """DDP402: rank that runs outside of collectives while other ranks wait in a collective."""
    if not running.is_at_work:
        return []
    busy = [rank.rank for rank in facts.ranks if not rank.waits and not rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.waits]
    return new_finding(
        "DDP402",
        ("work",),
        f"{capitalized(describe_ranks(facts, busy))}, and {format_ranks(others)} "
        f"{plural_verb('waits', 'wait', others)} for it: {describe_ranks(facts, others)}.",
        ranks=busy,
        location=Location.parse(running.lines[0]) if running.lines else None,
        evidence=divergence_evidence(running, waiting),
        fix="The worker waits for a lock that is never released, as happens if a process is forked while a thread "
        "holds it. Create locks, files and clients in the worker and not before, or give the loader "
        'multiprocessing_context="forkserver"; num_workers=0 shows if this is the cause.'
        if running.state.for_worker
        else "If the work there takes long, give the others more time: init_process_group(timeout=...). If not, end "
        "the wait or the loop there, so that this rank reaches the collective that the others wait in.",
    )


def explain_timeout(facts: FailureFacts) -> list[Finding]:
    """DDP402: collective that timed out, because a rank was still running or arrived late."""
    waited = [f.rank for f in facts.failures if re.search(TIMEOUT_PATTERN, f"{f.message}\n{f.traceback}")]
    log = facts.logs[facts.first.rank]
    late = [rank for rank in range(len(facts.logs)) if rank not in waited and facts.first.rank != rank]
    if not log or not late or any(not _lacks_at_most_one_call(facts.logs[rank], log) for rank in late):
        return []
    arrived = {f.rank: f for f in facts.failures if f.rank in late}
    if any(len(facts.logs[rank]) < len(log) if rank in arrived else rank not in facts.at_work for rank in late):
        return []  # the late rank waits or failed elsewhere
    rank, call = late[0], log[-1]
    milliseconds = next((int(n) for n in re.search(TIMEOUT_PATTERN, facts.text).groups() if n), 0)  # type: ignore[union-attr]
    limit = f" of {milliseconds / 1000:g} s" if milliseconds else ""
    of_group, where_set = " of the process group", "init_process_group"
    if call.operation == "monitored_barrier":
        of_group, where_set = "", call.operation
    lines = facts.at_work.get(rank, ())
    where = Location.parse(lines[0]) if lines else None
    state = f"was still at work at {lines[0]}" if lines else ""
    if rank in arrived:
        previous = facts.logs[rank][-2:-1]
        since_call = f" after {previous[0].operation} at {previous[0].location}" if previous else ""
        delay = arrived[rank].when - facts.first.when
        state = f"came to it {max(delay, 0.0):.0f} s after that, and was at work{since_call} until then"
        where = Location.parse(previous[0].location if previous else call.location)
    return facts.new_finding(
        "DDP402",
        (call.operation,),
        f"{format_ranks(waited).capitalize()} waited in {call.operation} at {call.location} for longer than the "
        f"timeout{limit}{of_group}, and {format_ranks(late)} {state}.",
        ranks=ranks_or_all(late, len(facts.logs)),
        location=where,
        evidence=[
            *(f"{format_ranks([r])} was at {' called from '.join(stack[:4])}" for r, stack in facts.at_work.items()),
            f"{format_ranks(waited)} and {format_ranks(late)} have reached the same {plural(len(log), 'collective')}",
            facts.first.message,
        ],
        fix=f"Give the others that time: {where_set}(timeout=...) longer than what {format_ranks(late)} "
        f"{plural_verb('does', 'do', late)} there; or split the work over all ranks; or do it outside of training.",
    )


def _lacks_at_most_one_call(log: Sequence[Call], other_log: Sequence[Call]) -> bool:
    is_prefix = [(c.operation, c.group) for c in log] == [(c.operation, c.group) for c in other_log[: len(log)]]
    return is_prefix and len(other_log) - 1 <= len(log) <= len(other_log)


def explain_by_circle_of_sends(graph: WaitGraph) -> list[Finding]:
    """DDP402: circular wait of ranks in sends and receives."""
    circle = graph.circle()
    is_of_sends = circle and all(call.between_two for _, call, _ in circle)
    return graph.circle_finding("DDP402", circle, SEND_ORDER) if is_of_sends else []


def explain_by_stopped_ranks(graph: WaitGraph, ranks: Sequence[int], doing: Mapping[int, str]) -> list[Finding]:
    """DDP402: ranks that wait for no rank, while other ranks wait for them."""
    fix = (
        f"Inspect the stacks of {format_ranks(ranks)} (py-spy dump --native --pid PID): a lock, native code that "
        "holds the GIL, data loading, a file system, or a branch that other ranks do not take. If a process is "
        "gone, its log says why."
    )
    evidence = format_by_text((rank, doing[rank]) for rank in ranks)
    return graph.hang_finding("DDP402", ranks, f"{format_ranks(ranks)} stopped calling collectives", fix, evidence)


def explain_by_missing_dumps(graph: WaitGraph) -> list[Finding]:
    """DDP402: ranks that others wait for, and that left no Flight Recorder dump."""
    ranks, who = sorted(graph.missing), format_ranks(graph.missing)
    fix = f"Find out from the log of {who} why there is no dump: the process may have ended or been killed."
    return graph.hang_finding("DDP402", ranks, f"{who} left no dump", fix)


def explain_by_device(graph: WaitGraph, ranks: Sequence[int]) -> list[Finding]:
    """DDP402: device that stopped completing calls, while its rank still enqueues calls."""
    evidence = []
    for rank in ranks:
        call = graph.devices[rank]
        peers, completed = graph.furthest(rank, call)
        last = max(open_call.number for open_call in graph.open_calls[rank] if open_call.group == call.group)
        evidence.append(
            f"rank {rank} has enqueued calls up to number {last} and not completed {graph.words(call)}; "
            f"{format_ranks(peers)} completed {completed}"
        )
    fix = (
        f"Look at the devices and machines of {format_ranks(ranks)}: Xid errors in dmesg, ECC errors in nvidia-smi -q, "
        "NVLink and network adapters. The collectives match, so that no line of the program is to be changed."
    )
    cause = f"the device stopped on {format_ranks(ranks)}: peers completed collectives that it did not complete"
    return graph.hang_finding("DDP402", ranks, cause, fix, evidence, graph.devices[ranks[0]])


def explain_by_late_rank(graph: WaitGraph) -> list[Finding]:
    """DDP402: rank that reached a call long after the other ranks."""
    calls = [(rank, c) for rank, calls in graph.open_calls.items() for c in calls if c.created and c.timeout]
    for entries in group_by(calls, lambda item: (graph.group(*item), item[1].between_two, item[1].number)).values():
        first = min((call for _, call in entries), key=lambda call: call.created)
        delays = {rank: call.created - first.created for rank, call in entries if not call.between_two}
        if late := sorted(rank for rank, seconds in delays.items() if seconds >= first.timeout / 2):
            who = format_ranks(late)
            fix = (
                f"Check what {who} did before (loading data, saving a checkpoint, evaluating, compiling), and split "
                "the work equally over all ranks; or increase the timeout: init_process_group(timeout=...)."
            )
            cause = f"{who} came {delays[late[0]]:.0f} s late to {graph.words(first)} (timeout: {first.timeout:.0f} s)"
            return graph.hang_finding("DDP402", late, cause, fix, call=first)
    return []


def explain_by_endless_call(graph: WaitGraph) -> list[Finding]:
    """DDP402: call that all ranks of its group entered, and that does not end."""
    waited_for = {peer for waits in graph.waits.values() for *_, peers in waits for peer in peers}
    idle = waited_for - {rank for rank, waits in graph.waits.items() if waits}
    first = ((rank, calls[0]) for rank, calls in graph.open_calls.items() if calls)
    rank_call = next((item for item in first if item[0] in idle or len(graph.group(*item)[1]) == 1), None)
    if rank_call is None:
        return []
    rank, call = rank_call
    ranks = sorted({rank, call.peer} if call.between_two else graph.group(rank, call)[1])
    fix = f"Look at the devices of {format_ranks(ranks)} and at the network between them (NCCL_DEBUG=INFO)."
    cause = f"{format_ranks(ranks)} entered {graph.words(call)}, which does not end"
    return graph.hang_finding("DDP402", ranks, cause, fix if len(ranks) > 1 else "", call=call)
