"""Explanations of ranks that ended apart, in order: the first that applies wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.endings import SYSTEM_EXIT, RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.rules.collectives.ddp401_rank_raised import explain_by_exception
from ddpcheck.rules.collectives.ddp402_hang import explain_by_work, missing_peer_finding
from ddpcheck.rules.collectives.ddp403_collective_mismatch import (
    different_calls_finding,
    explain_by_construction,
    explain_by_join,
    lone_call_finding,
)
from ddpcheck.rules.collectives.ddp404_rank_died import early_exit_finding
from ddpcheck.rules.collectives.ddp405_uneven_iterations import explain_by_loader
from ddpcheck.rules.collectives.divergent_branch import explain_by_branch, split_line
from ddpcheck.rules.collectives.early_exit import explain_by_loop, explain_by_skipped_end, explain_by_skipped_pass
from ddpcheck.rules.collectives.first_divergence import extra_call_index
from ddpcheck.rules.collectives.rank_failure import judge_interleaving
from ddpcheck.stream.entries import DDP_FORWARD, backward_of
from ddpcheck.trace.collectives import first_unequal_call
from ddpcheck.trace.positions import EndingFacts, Position, call_sequence, lines_of, local_branches

_MOST_CLASSES = 8  # classes of ranks with equal logs to compare with all others


def judge_endings(ranks: Sequence[RankAtEnd], blocks: Mapping[str, Sequence[Block]]) -> list[Finding]:
    """Return at most one finding: the divergence after which ranks wait for each other."""
    facts = EndingFacts(ranks, blocks)
    if circle := judge_circle(ranks):
        return circle
    if by_threads := judge_interleaving(ranks):
        return by_threads
    positions = divergence(facts)
    if positions is None:
        return explain_by_exit_alone(facts) or judge_missing_peer(ranks) or explain_by_construction(facts)
    sides = positions, positions[::-1]
    return next((findings for explain in EXPLANATIONS for pair in sides if (findings := explain(facts, *pair))), [])


def divergence(facts: EndingFacts) -> tuple[Position, Position] | None:
    """Return two ranks at their first divergence, or None if all logs are equal."""
    classes = sorted(group_by(facts.ranks, call_sequence).values(), key=len, reverse=True)
    for number, group in enumerate(classes[:_MOST_CLASSES]):  # starting with the most common log
        partings = [pair for peers in classes[number + 1 :] if (pair := _divergence_of(group[0], peers[0])) is not None]
        if partings:
            return min(partings, key=lambda pair: pair[0])[1:]
    return None


def _divergence_of(side: RankAtEnd, peer: RankAtEnd) -> tuple[int, Position, Position] | None:
    shared = [[call for call in rank.calls if {side.rank, peer.rank} <= set(call.members)] for rank in (side, peer)]
    with_groups = [[replace(call, payload=f"{call.payload} {call.group}") for call in log] for log in shared]
    if (mismatch := first_unequal_call(with_groups)) is None:
        return None
    index = extra_call_index(with_groups)
    index = mismatch[0] if index is None else index
    return index, *(_position(rank, calls, index) for rank, calls in zip((side, peer), shared, strict=True))  # type: ignore[return-value]


def _position(rank: RankAtEnd, calls: Sequence[Call], index: int) -> Position:
    call = calls[index] if index < len(calls) else None
    if call is not None:
        return Position(rank, call, lines_of(call), calls[:index])
    beside = [call for call in rank.calls if call not in calls]  # in groups without the other rank
    lines = rank.lines or (lines_of(rank.calls[-1]) if beside and rank.calls[-1] is beside[-1] else ())
    return Position(rank, None, () if rank.ended else lines, calls)


def judge_circle(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP402: circular point-to-point wait. Runs first: its ranks reach no collective."""
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
    """DDP402: point-to-point wait for a rank that is in no such call."""
    by_rank = {rank.rank: rank for rank in ranks}
    for rank in ranks:
        wait = rank.waits_for
        if wait is not None and wait.peer in by_rank and by_rank[wait.peer].waits_for is None:
            return missing_peer_finding(by_rank, [rank.rank, wait.peer], [wait], "")
    return []


def explain_by_exit(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while others continue."""
    called, where = leaver.of.exit_at, leaver.of.exit_at.rpartition(" ")[2]
    if not (leaver.of.ended and where and leaver.call is None and stayer.call is not None):
        return []
    if called == SYSTEM_EXIT:
        raises = [block.head for block in facts.around(stayer.lines, "rest") if block.word == "raise"]
        where = raises[0] if len(raises) == 1 else ""
    return early_exit_finding(facts, leaver, stayer, where)


def explain_by_exit_alone(facts: EndingFacts) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while others wait in unlogged calls."""
    exited = [rank for rank in facts.ranks if rank.ended and rank.exit_at]
    waiting = [rank for rank in facts.ranks if rank.waits and rank.lines and not rank.exit_at]
    if not exited or not waiting:
        return []
    where = exited[0].exit_at.rpartition(" ")[2].removeprefix(SYSTEM_EXIT)
    return early_exit_finding(
        facts, Position(exited[0], None, ()), Position(waiting[0], None, facts.now(waiting[0])), where
    )


def explain_by_own_call(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: collective that the other ranks never reach. Runs last."""
    sides = [side for side in (_own_call(facts, position, peer), _own_call(facts, peer, position)) if side is not None]
    if not sides:
        return different_calls_finding(facts, position, peer)
    if len(sides) == 2:
        in_branch = [side for side in sides if side[2] is not None]
        heads = {side[2].head for side in sides if side[2] is not None}
        if len(in_branch) == 2 and len(heads) == 1:
            return different_calls_finding(facts, position, peer)
        sides = in_branch if len(in_branch) == 1 else sorted(sides, key=lambda side: split_line(side[1]))
    caller, where, branch = sides[0]
    return lone_call_finding(facts, caller, peer if caller is position else position, where, branch)


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
    return position, where, next(iter(local_branches(facts, position, peer)), None)


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
