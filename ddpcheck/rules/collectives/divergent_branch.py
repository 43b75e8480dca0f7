"""Branches whose condition differs between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding
from ddpcheck.rules.collectives.ddp403_collective_mismatch import explain_by_local_condition
from ddpcheck.stream.entries import DDP_FORWARD, PASSES, backward_of
from ddpcheck.trace.positions import EndingFacts, Position, exits_of, lines_of


def split_line(line: str) -> tuple[str, int]:
    """Split 'path:line' into path and line number (-1 if unknown)."""
    path, _, number = line.rpartition(":")
    return path, int(number or -1)


def explain_by_branch(facts: EndingFacts, stayer: Position, leaver: Position) -> list[Finding]:
    """DDP403: branch that one rank takes and another rank skips in the same iteration.

    The rank that skips the branch took it in an earlier iteration. Runs before `explain_by_loop`, which would report
    that this rank left the loop early.
    """
    if stayer.call is None or leaver.is_at_work:
        return []  # a running rank may still reach it
    for block in _skipped_blocks(facts, stayer, leaver):
        blocks = facts.enclosing(stayer.lines, "loop", block.kind)
        loops = [outer for outer in blocks[: blocks.index(block)] if outer.kind == "loop"]
        is_own = block.kind != "try" or loops == facts.loops(stayer.lines)  # else the exception exits an inner loop
        if loops and is_own and _is_same_iteration(facts, loops[-1], block, stayer, leaver):
            return explain_by_local_condition(facts, stayer, leaver, block)
    return []


def _skipped_blocks(facts: EndingFacts, stayer: Position, leaver: Position) -> list[Block]:
    """Return branches of `stayer` that `leaver` now skips but took earlier, innermost first."""
    leaver_blocks = facts.enclosing(leaver.lines, "branch", "rest", "try")
    stayer_blocks = reversed(facts.enclosing(stayer.lines, "branch", "rest", "try"))
    return [block for block in stayer_blocks if block not in leaver_blocks and facts.has_been_in(leaver.state, block)]


def _is_same_iteration(facts: EndingFacts, loop: Block, block: Block, stayer: Position, leaver: Position) -> bool:
    """Return True if `leaver` skipped the block in the iteration that `stayer` is in.

    False if `leaver` may have taken an exit of the loop between the last common call and the block.
    """
    last_lines = lines_of(stayer.before[-1]) if stayer.before else ()
    if loop in facts.loops(leaver.lines):
        return _is_reached_first(stayer.lines, leaver.lines, last_lines) and _has_restarted(facts, stayer, leaver)
    was_in_loop = loop in facts.loops(last_lines)
    exits = exits_of(facts, loop, leaver, stayer)
    start = next((split_line(line)[1] for line in last_lines if loop in facts.blocks.get(line, ())), 0)
    if was_in_loop and any((line, word) not in loop.exits or start < line < block.line for line, word in exits):
        return False
    if was_in_loop and _is_reached_first(last_lines, stayer.lines, ()):  # so this iteration has begun
        return True
    assert stayer.call is not None
    ends_by_itself = loop.word == "for" and not exits
    is_loader_loop = any(str(loader_pass.location) == loop.head for rank in facts.ranks for loader_pass in rank.passes)
    return ends_by_itself and not is_loader_loop and stayer.call.operation not in (DDP_FORWARD, *PASSES)


def _is_reached_first(stack: Sequence[str], other_stack: Sequence[str], start_lines: Sequence[str]) -> bool:
    """Return True if a program at `start_lines` reaches the call stack `stack` before `other_stack`.

    Stacks begin with the innermost line. In a loop, lines above `start_lines` belong to the next iteration.
    """
    frames, other_frames, last = (tuple(reversed(lines)) for lines in (stack, other_stack, start_lines))
    for depth, (line, other_line) in enumerate(zip(frames, other_frames, strict=False)):
        if line != other_line:
            (path, number), (other_path, other_number) = split_line(line), split_line(other_line)
            known = len(last) > depth and last[:depth] == frames[:depth] and split_line(last[depth])[0] == path
            start = split_line(last[depth])[1] if known else 0
            return path == other_path and (number <= start, number) < (other_number <= start, other_number)
    return len(frames) > len(other_frames)


def _has_restarted(facts: EndingFacts, stayer: Position, leaver: Position) -> bool:
    """Return True if `leaver` ended or restarted the loop around the last common call."""
    if not stayer.before or not leaver.before:
        return True
    last_loops = facts.loops(lines_of(leaver.before[-1]))
    inner = [loop for loop in facts.loops(leaver.lines) if loop in last_loops and loop not in facts.loops(stayer.lines)]
    if not inner:
        return True
    previous, backward = backward_of(leaver.before[-1]), None if leaver.call is None else backward_of(leaver.call)
    if previous is not None and backward is not None and 0 <= previous.loader == backward.loader:
        return backward.batch[0] > previous.batch[0]
    runs = calls_per_execution(facts, inner[0], leaver.before)
    return len(runs) > 1 and runs[-1] % min(runs[:-1]) == 0  # as many calls as in earlier executions


def calls_per_execution(facts: EndingFacts, loop: Block, calls: Sequence[Call]) -> list[int]:
    """Count calls in each execution of `loop`; calls outside of `loop` end an execution."""
    is_inside = {lines: loop in facts.loops(lines) for lines in {lines_of(call) for call in calls}}
    runs = [0]
    for call in calls:
        if is_inside[lines_of(call)]:
            runs[-1] += 1
        elif runs[-1]:
            runs.append(0)
    return [run for run in runs if run]
