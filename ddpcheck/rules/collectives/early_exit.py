"""Loops and passes that ranks leave or skip before the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding
from ddpcheck.rules.collectives.ddp405_uneven_iterations import left_loader_loop_finding, uneven_loop_finding
from ddpcheck.rules.collectives.divergent_branch import calls_per_execution, split_line
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import uneven_no_sync_finding
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import skipped_pass_finding
from ddpcheck.stream.entries import DDP_FORWARD, Backward, backward_of
from ddpcheck.trace.positions import (
    EndingFacts,
    Position,
    backwards_of,
    count_visits,
    describe_loader_pass,
    describe_skipping_block,
    exits_of,
    lines_of,
    local_branches,
    loops_left,
)


def explain_by_loop(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP405: loop that a rank has left and others continue.

    Runs before `explain_by_unmatched_call`, because a collective after the loop looks like an extra call of the rank.
    """
    if stayer.call is None or not count_visits(leaver.state, stayer.call):
        return []
    loops = loops_left(facts, leaver, stayer)
    if not loops:
        return []
    if not _continues_last_pass(leaver.state, stayer.state, loops[-1]) and local_branches(facts, leaver, stayer):
        return []
    places = [loop for loop, inner in itertools.pairwise(loops) if _may_exit_early(facts, loop, inner, leaver, stayer)]
    return uneven_loop_finding(facts, (places or loops[-1:])[0], leaver, stayer)


def _may_exit_early(facts: EndingFacts, loop: Block, inner: Block, leaver: Position, stayer: Position) -> bool:
    """Return True if `leaver` may have left `loop` before `stayer`.

    `inner` is a loop in `loop`. False if `leaver` ran `inner` as often as `stayer`. If both ran `inner` at most once,
    False if `loop` iterates over a range and nothing can exit the loop early.
    """
    runs = [len(calls_per_execution(facts, inner, side.state.calls)) for side in (leaver, stayer)]
    if max(runs) > 1:
        return runs[0] < runs[1]
    return not loop.over.startswith("range(") or bool(exits_of(facts, loop, leaver, stayer))


def _continues_last_pass(leaver: RankAtEnd, stayer: RankAtEnd, loop: Block) -> bool:
    """Return True if `stayer` is still in the loader pass that `leaver` began last."""
    passes, leaver_passes = ([p for p in rank.passes if str(p.location) == loop.head][-1:] for rank in (stayer, leaver))
    pairs = zip(passes, leaver_passes, strict=False)
    return any(not p.exhausted and (p.loader, p.number) == (last.loader, last.number) for p, last in pairs)


def explain_by_skipped_pass(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP508: rank that skips a backward pass or batch; DDP502: `no_sync` on some ranks.

    Runs before `explain_by_loop`, because a rank that skipped an iteration reaches the end of its loop earlier.
    """
    by_rank = {rank.rank: backwards_of(rank) for rank in facts.ranks}
    calls = [b.call for backwards in by_rank.values() for b in backwards]
    if len({call.group for call in calls}) != 1:
        return []
    for wrapper in sorted({call.payload for call in calls}):
        of_wrapper = {rank: [b for b in backwards if b.call.payload == wrapper] for rank, backwards in by_rank.items()}
        if findings := _judge_wrapper(facts, {rank: backwards for rank, backwards in of_wrapper.items() if backwards}):
            return findings
    return []


def _judge_wrapper(facts: EndingFacts, backwards: Mapping[int, Sequence[Backward]]) -> list[Finding]:
    if len(backwards) < 2:
        return []
    counts = {rank.rank: _count_passes(rank, backwards[rank.rank]) for rank in facts.ranks if rank.rank in backwards}
    most = max(counts.values())
    for number, row in enumerate(zip(*backwards.values(), strict=False)):
        if len({(b.forward, b.batch, b.unsynced) for b in row}) == 1 or len({b.line for b in row}) > 1:
            continue
        by_rank = dict(zip(backwards, row, strict=True))
        for kind in ("unsynced", "forward", "batch"):
            values = {rank: getattr(b, kind) for rank, b in by_rank.items()}
            least = min(values.values())
            ahead = [rank for rank, value in values.items() if value > least]
            if ahead and all(counts[rank] < most for rank in ahead):
                behind = next(b for rank, b in by_rank.items() if rank not in ahead)
                if kind == "batch" and not all(
                    by_rank[rank].loader == behind.loader
                    and any(b.batch[0] == behind.batch[0] for b in backwards[rank])
                    for rank in ahead
                ):
                    continue  # a rank has not trained on this loader pass
                numbers = [f"rank {rank}, backward pass {number + 1}: of {b.call.place}" for rank, b in by_rank.items()]
                block, reasons = _find_skipping_block(facts, behind, kind)
                reasons = [*reasons, "from then on, backward passes of different batches are averaged with each other"]
                if findings := left_loader_loop_finding(facts, ahead, by_rank, behind):
                    return findings
                others = [rank for rank in by_rank if rank not in ahead]
                if kind == "unsynced":
                    return uneven_no_sync_finding(facts, ahead, others, behind, [*numbers, *reasons])
                return skipped_pass_finding(facts, kind, ahead, others, behind, block, [*numbers, *reasons])
    return []


def _count_passes(rank: RankAtEnd, backwards: Sequence[Backward]) -> int:
    """Count a rank's backward passes; a forward pass after the last backward counts, too."""
    last = backwards[-1]
    return len(backwards) + (rank.forwards.get(split_line(last.line)[1], 0) > last.forward)


def _find_skipping_block(facts: EndingFacts, backward: Backward, kind: str) -> tuple[Block | None, list[str]]:
    """Return the block that skipped a pass, if unique, and descriptions of all candidates."""
    lines = lines_of(backward.call) if kind == "forward" else (backward.line, *lines_of(backward.call)[1:])
    frames = []
    for line in lines:
        frames.append(line)
        if facts.loops((line,)):
            break
    inner = facts.loops(frames[-1:])[-1:] if frames else []
    forward_blocks = facts.enclosing((backward.line,), "branch", "rest") if kind == "forward" else []
    candidates = [
        block
        for block in facts.enclosing(frames, "branch", "rest", "try")
        if block not in forward_blocks and (not inner or block.path != inner[0].path or block.first > inner[0].first)
    ]
    jumps = [block for block in candidates if block.kind == "try" or (block.kind == "rest" and block.word != "raise")]
    likely = jumps or candidates
    return likely[0] if len(likely) == 1 else None, [describe_skipping_block(block) for block in candidates]


def explain_by_skipped_end(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP508: forward or backward pass that a rank skipped in its last iteration.

    Runs before `explain_by_loop`, because such a rank seems to have left the loop early.
    """
    pending = _pending_backward(facts, stayer)
    kind = "" if pending is None else _last_part_of_iteration(facts, leaver, stayer, pending)
    if pending is None or not kind:
        return []
    length, others = len(leaver.before), [rank for rank in facts.ranks if rank not in (leaver.state, stayer.state)]
    sides = [Position(rank, None, facts.current_stack(rank), rank.calls[:length]) for rank in others]
    ahead = sorted(
        [
            leaver.state.rank,
            *(side.state.rank for side in sides if _last_part_of_iteration(facts, side, stayer, pending)),
        ]
    )
    part = "batch" if kind == "batch" else "forward"
    block, reasons = _find_skipping_block(facts, pending, part)
    passes = {rank.rank: _loader_pass_of(rank, pending) for rank in facts.ranks}
    batches = [f"rank {rank}: {describe_loader_pass(taken)}" for rank, taken in passes.items() if taken is not None]
    forwards = [f"rank {rank}: as many forward passes at {pending.line}" for rank in ahead if kind == "forward"]
    block = None if kind == "unknown" else block
    not_ahead = [rank for rank in passes if rank not in ahead]
    return skipped_pass_finding(facts, part, ahead, not_ahead, pending, block, [*batches, *forwards, *reasons])


def _pending_backward(facts: EndingFacts, stayer: Position) -> Backward | None:
    """Return the backward pass that `stayer` is in, or that follows its current forward."""
    if stayer.call is None:
        return None
    if stayer.call.operation != DDP_FORWARD:
        return backward_of(stayer.call)
    heads = {loop.head for loop in facts.loops(stayer.lines)}
    passes = [loader_pass for loader_pass in stayer.state.passes if str(loader_pass.location) in heads]
    if not passes:
        return None
    last = passes[-1]  # begun last, of any loader: one loop may iterate several loaders
    return Backward(stayer.call, -1, line=stayer.lines[0], batch=(last.number, last.batches), loader=last.loader)


def _loader_pass_of(rank: RankAtEnd, backward: Backward) -> LoaderPass | None:
    return next((p for p in rank.passes if (p.loader, p.number) == (backward.loader, backward.batch[0])), None)


def _last_part_of_iteration(facts: EndingFacts, leaver: Position, stayer: Position, pending: Backward) -> str:
    """Return the last part of `stayer`'s current iteration that `leaver` executed.

    "forward": `leaver` skipped only the backward pass. "batch": `leaver` also skipped the forward pass. "unknown": it
    is not known if `leaver` ran the forward pass. "": `leaver` may have left the loop early.
    """
    loops = loops_left(facts, leaver, stayer)
    if not loops or _has_as_many_backwards(leaver.state, stayer) or not (leaver.lines or leaver.state.ended):
        return ""
    last, peer_last = next(_common_backwards(leaver, stayer, pending), (None, None))
    lead = 0 if last is None or peer_last is None else last.forward - peer_last.forward
    forwards = leaver.state.forwards.get(split_line(pending.line)[1]) if pending.forward >= 0 else -1
    has_forward = forwards is not None and 0 <= pending.forward <= forwards - lead
    taken = _loader_pass_of(leaver.state, pending)
    is_same_pass = last is None or peer_last is None or (last.loader, last.batch) == (peer_last.loader, peer_last.batch)
    has_batch = is_same_pass and taken is not None and taken.batches >= pending.batch[1]
    if taken is None or all(loop.head != str(taken.location) for loop in loops):  # may not be a loop over the loader
        has_batch = has_batch and peer_last is not None and peer_last.batch != pending.batch
    has_continued = has_forward and forwards is not None and forwards - lead > pending.forward
    if has_batch and taken is not None:
        has_continued |= taken.exhausted or taken.batches > pending.batch[1]
    if not has_continued and any(exits_of(facts, loop, leaver, stayer) for loop in loops):
        return ""  # may have left during this iteration
    if has_forward:
        return "forward"
    return ("unknown" if forwards is None else "batch") if has_batch else ""


def _has_as_many_backwards(leaver: RankAtEnd, stayer: Position) -> bool:
    if stayer.call is None or (backward := backward_of(stayer.call)) is None:
        return False
    count, stayer_count = (sum(b.line == backward.line for b in backwards_of(rank)) for rank in (leaver, stayer.state))
    return count >= stayer_count


def _common_backwards(leaver: Position, stayer: Position, pending: Backward) -> Iterator[tuple[Backward, Backward]]:
    """Yield both ranks' backward passes of the same forward call as `pending`, latest first."""
    for call, other_call in zip(reversed(leaver.before), reversed(stayer.before), strict=False):
        backward, other_backward = backward_of(call), backward_of(other_call)
        if backward is not None and other_backward is not None and backward.line == other_backward.line == pending.line:
            yield backward, other_backward
