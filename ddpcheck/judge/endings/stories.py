"""DDP401 to 405, 502 and 508: root cause of a hang, from rank logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.endings import SYSTEM_EXIT, PeerWait, RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, join_names, one_finding, plural_verb
from ddpcheck.judge.endings.branch_endings import (
    EndingFacts,
    Position,
    calls_there,
    explain_by_branch,
    explain_by_exception,
    in_words,
    lines_of,
    named,
    own_branches,
    split_line,
    told,
)
from ddpcheck.judge.endings.collective_order import first_mismatch, place_of_call_in_addition
from ddpcheck.judge.endings.loop_endings import explain_by_join, explain_by_loader, explain_by_loop
from ddpcheck.judge.endings.skipped_endings import explain_by_skipped_end, explain_by_skipped_pass
from ddpcheck.judge.endings.threads import judge_interleaving
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, backward_of

_MOST_CLASSES = 8  # classes of ranks with equal logs to compare with all others


def judge_endings(ranks: Sequence[RankAtEnd], blocks: Mapping[str, Sequence[Block]]) -> list[Finding]:
    """Return at most one finding: the divergence after which ranks wait for each other."""
    facts = EndingFacts(ranks, blocks)
    if circle := judge_circle(ranks):
        return circle
    if by_threads := judge_interleaving(ranks):
        return by_threads
    positions = parting(facts)
    if positions is None:
        return explain_by_exit_alone(facts) or judge_missing_peer(ranks) or explain_by_construction(facts)
    sides = positions, positions[::-1]
    return next((findings for explain in EXPLANATIONS for pair in sides if (findings := explain(facts, *pair))), [])


def parting(facts: EndingFacts) -> tuple[Position, Position] | None:
    """Return two ranks at their first divergence, or None if all logs are equal."""
    classes = sorted(group_by(facts.ranks, _sequence).values(), key=len, reverse=True)
    for number, group in enumerate(classes[:_MOST_CLASSES]):  # starting with the most common log
        partings = [pair for peers in classes[number + 1 :] if (pair := _parting_of(group[0], peers[0])) is not None]
        if partings:
            return min(partings, key=lambda pair: pair[0])[1:]
    return None


def _sequence(rank: RankAtEnd) -> tuple[object, ...]:
    return tuple((call.operation, call.group, call.payload, lines_of(call)) for call in rank.calls)


def _parting_of(side: RankAtEnd, peer: RankAtEnd) -> tuple[int, Position, Position] | None:
    shared = [[call for call in rank.calls if {side.rank, peer.rank} <= set(call.members)] for rank in (side, peer)]
    with_groups = [[replace(call, payload=f"{call.payload} {call.group}") for call in log] for log in shared]
    if (mismatch := first_mismatch(with_groups)) is None:
        return None
    index = place_of_call_in_addition(with_groups)
    index = mismatch[0] if index is None else index
    return index, *(_position(rank, calls, index) for rank, calls in zip((side, peer), shared, strict=True))  # type: ignore[return-value]


def _position(rank: RankAtEnd, calls: Sequence[Call], index: int) -> Position:
    call = calls[index] if index < len(calls) else None
    if call is not None:
        return Position(rank, call, lines_of(call), calls[:index])
    beside = [call for call in rank.calls if call not in calls]  # in groups without the other rank
    lines = rank.lines or (lines_of(rank.calls[-1]) if beside and rank.calls[-1] is beside[-1] else ())
    return Position(rank, None, () if rank.ended else lines, calls)


# Point-to-point calls


SEND_ORDER = (
    "Let one of two ranks send first and the other one receive first (if rank % 2: ...), or start both directions "
    "together: batch_isend_irecv([P2POp(isend, ...), P2POp(irecv, ...)]), and wait for all of them after that."
)
GROUP_ORDER = "Have every rank call the collectives of its process groups in the same order."
_PARTNER = "Let every send have its recv on the other rank: of the same two ranks, group and tag, in the same order."


def judge_circle(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP402: circular point-to-point wait. Runs first: its ranks reach no collective."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        circle = [rank.rank]
        while (wait := by_rank[circle[-1]].waits_for) is not None and wait.peer in by_rank and wait.peer not in circle:
            circle.append(wait.peer)
        waits = [wait for number in circle if (wait := by_rank[number].waits_for) is not None]
        if len(waits) == len(circle) > 1 and waits[-1].peer == rank.rank:
            return _of_peers(by_rank, circle, waits, ": each waits for the next one")
    return []


def judge_missing_peer(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP402: point-to-point wait for a rank that is in no such call."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        wait = rank.waits_for
        if wait is not None and wait.peer in by_rank and by_rank[wait.peer].waits_for is None:
            return _of_peers(by_rank, [rank.rank, wait.peer], [wait], "")
    return []


def _of_peers(
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


# Rank that exited


def explain_by_exit(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while others continue."""
    called, where = leaver.of.exit_at, leaver.of.exit_at.rpartition(" ")[2]
    if not (leaver.of.ended and where and leaver.call is None and stayer.call is not None):
        return []
    if called == SYSTEM_EXIT:
        raises = [block.head for block in facts.around(stayer.lines, "rest") if block.word == "raise"]
        where = raises[0] if len(raises) == 1 else ""
    return _of_exit(facts, leaver, stayer, where)


def explain_by_exit_alone(facts: EndingFacts) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while others wait in unlogged calls."""
    exited = [rank for rank in facts.ranks if rank.ended and rank.exit_at]
    waiting = [rank for rank in facts.ranks if rank.waits and rank.lines and not rank.exit_at]
    if not exited or not waiting:
        return []
    where = exited[0].exit_at.rpartition(" ")[2].removeprefix(SYSTEM_EXIT)
    return _of_exit(facts, Position(exited[0], None, ()), Position(waiting[0], None, facts.now(waiting[0])), where)


def explain_by_construction(facts: EndingFacts) -> list[Finding]:
    """DDP403: DDP constructor that waits for a rank at the end of its script."""
    finished = [rank.rank for rank in facts.ranks if rank.ended and not rank.constructs]
    constructing = [rank for rank in facts.ranks if rank.constructs and rank.waits and rank.lines]
    if not finished or not constructing:
        return []
    others, have = [rank.rank for rank in constructing], plural_verb("has", "have", finished)
    return one_finding(
        "DDP403",
        ("DistributedDataParallel",),
        f"{format_ranks(others).capitalize()} {plural_verb('constructs', 'construct', others)} DistributedDataParallel "
        f"at {constructing[0].lines[0]}, which waits for all ranks, and {format_ranks(finished)} {have} "
        "run to the end of the script without it.",
        ranks=finished,
        location=Location.parse(constructing[0].lines[0]),
        evidence=[f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks],
        fix="Construct the wrapper on every rank of its process group, or leave the script on all of them before that.",
    )


def _of_exit(facts: EndingFacts, leaver: Position, stayer: Position, where: str) -> list[Finding]:
    called, verbs = leaver.of.exit_at, ("calls", "call")
    if called.startswith(SYSTEM_EXIT):
        verbs = ("raises", "raise")
    if where in stayer.lines:
        return []  # sys.exit(main()): the other rank is still in main()
    exited = [rank.rank for rank in facts.ranks if rank.exit_at == called and rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.rank not in exited]
    return one_finding(
        "DDP404",
        ("exit",),
        f"{format_ranks(exited).capitalize()} {plural_verb(*verbs, exited)} {called} while "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)}: {told(facts, others)}.",
        ranks=exited if len(exited) < len(facts.ranks) else (),
        location=Location.parse(where),
        evidence=calls_there(leaver, stayer)
        if stayer.call
        else [f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks],
        fix="End the script on every rank at the same place: all_reduce the condition before the test, and call "
        "destroy_process_group() on each rank at its end.",
    )


# Running rank


def explain_by_work(facts: EndingFacts, running: Position, waiting: Position) -> list[Finding]:
    """DDP402: running rank that others wait for; its next call is unknown."""
    if not running.is_at_work:
        return []
    busy = [rank.rank for rank in facts.ranks if not rank.waits and not rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.waits]
    return one_finding(
        "DDP402",
        ("work",),
        f"{capitalized(told(facts, busy))}, and {format_ranks(others)} {plural_verb('waits', 'wait', others)} for it: "
        f"{told(facts, others)}.",
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


# Extra call on some ranks


def explain_by_own_call(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: collective that the other ranks never reach. Runs last."""
    sides = [side for side in (_own_call(facts, position, peer), _own_call(facts, peer, position)) if side is not None]
    if not sides:
        return _different(facts, position, peer)
    if len(sides) == 2:
        in_branch = [side for side in sides if side[2] is not None]
        heads = {side[2].head for side in sides if side[2] is not None}
        if len(in_branch) == 2 and len(heads) == 1:
            return _different(facts, position, peer)
        sides = in_branch if len(in_branch) == 1 else sorted(sides, key=lambda side: split_line(side[1]))
    caller, where, branch = sides[0]
    return _called_alone(facts, caller, peer if caller is position else position, where, branch)


_Side = tuple[Position, str, Block | None]


def _own_call(facts: EndingFacts, position: Position, peer: Position) -> _Side | None:
    """Return `position`, its innermost line that `peer` never reached, and the skipped branch."""
    if position.call is not None and position.call.operation == DDP_FORWARD:
        backwards = filter(None, map(backward_of, peer.of.calls))
        if position.lines and position.lines[0] in {backward.line for backward in backwards}:
            return None  # without buffers only the backward pass is logged
    reached = {line for call in peer.of.calls for line in lines_of(call)} | {*peer.lines, *facts.now(peer.of)}
    where = next((line for line in position.lines if line not in reached), None)
    if where is None or not (position.call or position.of.waits):
        return None
    return position, where, next(iter(own_branches(facts, position, peer)), None)


def _called_alone(
    facts: EndingFacts, side: Position, peer: Position, where: str, branch: Block | None
) -> list[Finding]:
    calling = [
        rank.rank
        for rank in facts.ranks
        if any(where in lines_of(call) for call in rank.calls) or where in facts.now(rank)
    ]
    missing = [rank.rank for rank in facts.ranks if rank.rank not in calling]
    if side.call is None and (wait := side.of.waits_for) is not None:
        by_rank = {rank.rank: rank for rank in facts.ranks}
        return _of_peers(by_rank, [side.of.rank, *({wait.peer} & by_rank.keys())], [wait], "")
    name = named(side.call) if side.call is not None else side.of.doing.partition(" at ")[0].removeprefix("waits in ")
    test = f", {in_words(branch)}" if branch is not None else ""
    instead, fix, place = "", _fix_of_call(side.call, name, where, branch), where
    if side.call is not None and peer.call is not None and side.call.group != peer.call.group:
        place = next((line for line in side.lines if branch in facts.blocks.get(line, ())), where)
        test = f", in {side.call.group_words or 'another process group'}{test}"
        instead = f", in {peer.call.group_words}" if peer.call.group_words else ""
        fix = f"Have every rank call the collectives of both process groups in the same order. {fix}"
    never = branch is None and peer.call is None  # then the call is not extra
    verb = plural_verb("reaches", "reach", calling)
    return one_finding(
        "DDP403",
        (side.call.operation if side.call is not None else name.partition("(")[0].rpartition(" ")[2],),
        f"{format_ranks(calling).capitalize()} {verb} {name} at {where}{test}, and {format_ranks(missing)} "
        f"{plural_verb('does', 'do', missing)} not: {told(facts, missing)}{instead}.",
        ranks=missing if len(missing) < len(calling) or never else calling,
        location=Location.parse(place),
        evidence=[
            f"called from {', from '.join(side.lines[1:4])}" if len(side.lines) > 1 else "",
            *(f"which is {in_words(block)}" for block in own_branches(facts, side, peer)[1:]),
            *calls_there(side, peer),
        ],
        fix=fix,
    )


def _fix_of_call(call: Call | None, name: str, where: str, branch: Block | None) -> str:
    out = f" (take it out of the branch at {branch.head})" if branch is not None and branch.kind == "branch" else ""
    if call is None:
        return f"Let the other rank reach the partner of {name} at {where}, or remove it."
    if call.operation == DDP_FORWARD:
        return (
            "DDP broadcasts buffers in forward, in eval mode too, and every rank has to take part. To evaluate on one "
            f"rank, call the inner module at {where}: model.module(x) instead of model(x). Or run it on every "
            f"rank{out}, with the same number of batches."
        )
    if call.operation == SHARD_FORWARD:
        return (
            "fully_shard gathers parameters in each forward pass, in eval mode and under no_grad too, and every rank "
            f"has to take part: run it at {where} on every rank{out}, with the same number of batches."
        )
    if call.operation == DDP_BACKWARD:
        return f"Make the backward pass at {where} on every rank{out}, or compute it without the wrapper, in no_sync."
    if call.operation == "new_group":
        return (
            f"Call new_group at {where} on every rank of the job, including those that are not in the group{out}; with "
            "use_local_synchronization=True only its members call it."
        )
    return f"Call {call.operation} at {where} on every rank{out}, equally often and in the same order, or on none."


def _different(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: calls in a different order, or in different branches of one `if`."""
    if position.call is None or peer.call is None:
        return []
    first, second = (position, peer) if position.of.rank < peer.of.rank else (peer, position)
    assert first.call is not None and second.call is not None
    ranks = [r.rank for r in facts.ranks if _sequence(r) == _sequence(second.of)]
    heads = {block.head for block in facts.around(first.lines, "branch")} & {
        block.head for block in facts.around(second.lines, "branch") if block not in facts.around(first.lines, "branch")
    }
    group, other_group = (f" in {call.group_words}" if call.group_words else "" for call in (first.call, second.call))
    if differs := first.call.group != second.call.group:
        other_group = other_group or ", in another process group"
    return one_finding(
        "DDP403",
        sorted({first.call.operation, second.call.operation}),
        f"{format_ranks([first.of.rank]).capitalize()} reaches {first.call}{group if differs else ''}, and "
        f"{format_ranks(ranks)} {plural_verb('reaches', 'reach', ranks)} {second.call}{other_group if differs else ''}"
        + (f", in the other branch of the `if` at {min(heads)}" if heads else "")
        + ".",
        ranks=ranks if len(ranks) * 2 <= len(facts.ranks) else [r.rank for r in facts.ranks if r.rank not in ranks],
        location=Location.parse(min(heads) if heads else second.call.location),
        evidence=calls_there(first, second),
        fix=GROUP_ORDER if differs else "",
    )


EXPLANATIONS = (
    explain_by_exit,
    explain_by_exception,
    explain_by_join,
    explain_by_loader,
    explain_by_skipped_pass,
    explain_by_branch,
    explain_by_skipped_end,
    explain_by_loop,
    explain_by_work,
    explain_by_own_call,
)
"""Explanations in order, each tried for both orders of the two ranks."""
