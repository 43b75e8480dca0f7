"""DDP401 and 403: hangs after an exception or a branch on some ranks only.

Also helpers of the other judges of a hang: enclosing blocks of the program, loop exits, wording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import agreeing, format_ranks, one_finding, plural_verb, told_together
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, PASSES, SHARD_FORWARD, Backward, backward_of, handled_in


def backwards_of(rank: RankAtEnd) -> list[Backward]:
    """Return the logged DDP backward passes (or sharded forward passes) of a rank."""
    return [backward for call in rank.calls if (backward := backward_of(call)) is not None]


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a rank at the divergence: its collective, if any, and its lines."""

    of: RankAtEnd
    call: Call | None
    lines: tuple[str, ...]
    before: Sequence[Call] = ()  # collectives common to both ranks, before the divergence

    @property
    def is_at_work(self) -> bool:
        """Return True if the rank is running and may still reach a collective."""
        return self.call is None and not self.of.waits and not self.of.ended


@dataclass(frozen=True, slots=True)
class EndingFacts:
    """Ranks of a hung job and the code blocks around their lines."""

    ranks: Sequence[RankAtEnd]  # all ranks, in order
    blocks: Mapping[str, Sequence[Block]]  # by 'path:line': enclosing blocks, outermost first

    def around(self, lines: Sequence[str], *kinds: str) -> list[Block]:
        """Return the blocks of `kinds` around the lines of a stack, outermost first."""
        return [block for line in reversed(lines) for block in self.blocks.get(line, ()) if block.kind in kinds]

    def loops(self, lines: Sequence[str]) -> list[Block]:
        """Return the loops around the lines of a stack, outermost first."""
        return self.around(lines, "loop")

    def has_been_in(self, rank: RankAtEnd, block: Block) -> bool:
        """Return True if a rank called a collective inside a block."""
        return any(block in self.around(lines, block.kind) for lines in {lines_of(call) for call in rank.calls})

    def has_left(self, side: Position, loop: Block) -> bool:
        """Return True if the last common collective was called inside a loop."""
        return bool(side.before) and loop in self.loops(lines_of(side.before[-1]))

    def now(self, rank: RankAtEnd) -> tuple[str, ...]:
        """Return the current stack of a rank, else the lines of its last collective."""
        return rank.lines or (lines_of(rank.calls[-1]) if rank.calls and not rank.ended else ())


def lines_of(call: Call) -> tuple[str, ...]:
    """Return the program lines that led to a collective, innermost first."""
    return call.callers or ((call.location,) if call.location else ())


def split_line(line: str) -> tuple[str, int]:
    """Split 'path:line' into path and line number (-1 if unknown)."""
    path, _, number = line.rpartition(":")
    return path, int(number or -1)


def loops_left(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Block]:
    """Return the loops that `leaver` has exited and `stayer` is in, outermost first."""
    leaver_loops = facts.loops(leaver.lines)
    return [loop for loop in facts.loops(stayer.lines) if loop not in leaver_loops and facts.has_left(leaver, loop)]


def exits_of(facts: EndingFacts, loop: Block, leaver: Position, stayer: Position) -> list[tuple[int, str]]:
    """Return (line, word) of each early exit from a loop, including enclosing `try` blocks."""
    exited = [] if leaver.of.ended else facts.around(leaver.lines, "try")
    tries = [] if leaver.of.ended else [block for block in facts.around(stayer.lines, "try") if block not in exited]
    enclosing = [b for b in tries if b.path == loop.path and b.first <= loop.first and b.last >= loop.last]
    return [*loop.exits, *((b.line, b.word) for b in enclosing)]


def own_branches(facts: EndingFacts, position: Position, peer: Position) -> list[Block]:
    """Return the branches that `position` is in and `peer` never entered, innermost first.

    Code after an early exit counts as a branch and comes last, if `peer` is outside of the function or loop that the
    exit leaves. Empty if `peer` is still in a loop that `position` has left, and may reach the branch later.
    """
    if loops_left(facts, position, peer) and not set(facts.loops(position.lines)) & set(facts.loops(peer.lines)):
        return []
    peer_blocks = facts.around(peer.lines, "branch", "rest", "function", "loop")
    scopes = {"return": "function", "break": "loop", "raise": "function"}
    branches = []
    for block in dict.fromkeys(reversed(facts.around(position.lines, "branch", "rest"))):  # comprehensions have frames
        outer = facts.around(position.lines, scopes.get(block.word, "")) if block.kind == "rest" else []
        exited = [b for b in outer if b.path == block.path and b.first <= block.first and b.last >= block.last][-1:]
        if block not in peer_blocks and not set(exited) & set(peer_blocks) and not facts.has_been_in(peer.of, block):
            branches.append(block)
    return sorted(branches, key=lambda block: block.kind == "rest")


# Wording


def described_call(call: Call) -> str:
    """Describe a call with its line."""
    return f"{named(call)}{f' at {call.location}' if call.location else ''}"


def in_words(branch: Block) -> str:
    """Describe a position inside a branch or after an early exit."""
    where = {"branch": "in the branch", "try": f"in the block that the `{branch.word}` cuts short"}
    return f"{where.get(branch.kind, f'past the `{branch.word}`')} at {branch.head}"


def named(call: Call) -> str:
    """Return the display name of a call."""
    return _NAMES.get(call.operation, call.operation)


_NAMES = {
    DDP_BACKWARD: "backward",
    DDP_FORWARD: "the forward of DistributedDataParallel",
    SHARD_FORWARD: "the forward of the sharded module",
}


def and_told(facts: EndingFacts, ranks: Sequence[int]) -> str:
    """Return the end of a sentence on `ranks` with what each rank does."""
    doing = {rank.doing for rank in facts.ranks if rank.rank in ranks}
    return f" and {agreeing(doing.pop(), ranks)}" if len(doing) == 1 else f" ({told(facts, ranks)})"


def told(facts: EndingFacts, ranks: Sequence[int]) -> str:
    """Describe what each of `ranks` does."""
    return ", ".join(told_together((rank.rank, rank.doing) for rank in facts.ranks if rank.rank in ranks))


def calls_there(position: Position, peer: Position) -> list[str]:
    """Return evidence: the diverging collective and the final state of each rank."""
    sides = sorted((position, peer), key=lambda side: side.of.rank)
    return [
        *(
            f"rank {side.of.rank} reaches {side.call or 'no further collective'}"
            for side in sides
            if side.call is not None or side.of.ended or not side.of.waits  # else it waits in an unlogged collective
        ),
        *(f"rank {side.of.rank}: {side.of.doing}" for side in sides),
    ]


def explain_by_exception(facts: EndingFacts, raiser: Position, peer: Position) -> list[Finding]:
    """DDP401: collective in a `finally` or `except`. Runs early: it resembles other causes."""
    error = handled_in(raiser.call) if raiser.call is not None else None
    if raiser.call is None or error is None:
        return []
    kind, where, text = error
    if peer.call is not None and (peer_error := handled_in(peer.call)) is not None and peer_error[:2] == (kind, where):
        return []
    summary = f"{kind}{f': {text}' if text else ''}"
    others = [rank.rank for rank in facts.ranks if rank is not raiser.of]
    return one_finding(
        "DDP401",
        ("run",),
        f"Rank {raiser.of.rank} raised {summary.rstrip('.')}{f', at {where}' if where else ''}, and reaches "
        f"{described_call(raiser.call)} in the `finally` or `except` that handles it; {told(facts, others)}.",
        severity=Severity.ERROR,
        ranks=[raiser.of.rank],
        location=Location.parse(where or raiser.call.location),
        evidence=calls_there(raiser, peer),
        fix=f"Fix the exception{f' at {where}' if where else ''}. Call no collective in a `finally` or `except` that a "
        f"single rank may reach ({described_call(raiser.call)}): if the exception ends the rank, torchrun ends the "
        "others.",
    )


def explain_by_branch(facts: EndingFacts, stayer: Position, leaver: Position) -> list[Finding]:
    """DDP403: branch that one rank takes and another skips in the same iteration.

    Both have taken it before. Runs before loops, because a rank in the next outer iteration has left inner loops, too.
    """
    if stayer.call is None or leaver.is_at_work:
        return []  # a running rank may still reach it
    for block in _skipped_blocks(facts, stayer, leaver):
        blocks = facts.around(stayer.lines, "loop", block.kind)
        loops = [outer for outer in blocks[: blocks.index(block)] if outer.kind == "loop"]
        is_own = block.kind != "try" or loops == facts.loops(stayer.lines)  # else the exception exits an inner loop
        if loops and is_own and _is_same_pass(facts, loops[-1], block, stayer, leaver):
            return _decided_alone(facts, stayer, leaver, block)
    return []


def _skipped_blocks(facts: EndingFacts, stayer: Position, leaver: Position) -> list[Block]:
    """Return blocks that `stayer` is in and `leaver` was in earlier, innermost first."""
    leaver_blocks = facts.around(leaver.lines, "branch", "rest", "try")
    stayer_blocks = reversed(facts.around(stayer.lines, "branch", "rest", "try"))
    return [block for block in stayer_blocks if block not in leaver_blocks and facts.has_been_in(leaver.of, block)]


def _is_same_pass(facts: EndingFacts, loop: Block, block: Block, stayer: Position, leaver: Position) -> bool:
    """Return True if `leaver` skipped the block in the same iteration of the loop.

    False if an exit between the last common call and the block may have been taken.
    """
    before = lines_of(stayer.before[-1]) if stayer.before else ()
    if loop in facts.loops(leaver.lines):
        return _comes_first(stayer.lines, leaver.lines, before) and _is_restarted(facts, stayer, leaver)
    was_in_loop = loop in facts.loops(before)
    exits = exits_of(facts, loop, leaver, stayer)
    start = next((split_line(line)[1] for line in before if loop in facts.blocks.get(line, ())), 0)
    if was_in_loop and any((line, word) not in loop.exits or start < line < block.line for line, word in exits):
        return False
    if was_in_loop and _comes_first(before, stayer.lines, ()):  # so this iteration has begun
        return True
    assert stayer.call is not None
    ends_by_itself = loop.word == "for" and not exits
    is_loader_loop = any(str(loader_pass.location) == loop.head for rank in facts.ranks for loader_pass in rank.passes)
    return ends_by_itself and not is_loader_loop and stayer.call.operation not in (DDP_FORWARD, *PASSES)


def _comes_first(stack: Sequence[str], other_stack: Sequence[str], before: Sequence[str]) -> bool:
    """Return True if a program at `before` reaches `stack` before `other_stack`; innermost lines first.

    In a loop, lines above `before` belong to the next iteration.
    """
    frames, other_frames, last = (tuple(reversed(lines)) for lines in (stack, other_stack, before))
    for depth, (line, other_line) in enumerate(zip(frames, other_frames, strict=False)):
        if line != other_line:
            (path, number), (other_path, other_number) = split_line(line), split_line(other_line)
            known = len(last) > depth and last[:depth] == frames[:depth] and split_line(last[depth])[0] == path
            start = split_line(last[depth])[1] if known else 0
            return path == other_path and (number <= start, number) < (other_number <= start, other_number)
    return len(frames) > len(other_frames)


def _is_restarted(facts: EndingFacts, stayer: Position, leaver: Position) -> bool:
    """Return True if the inner loop of `leaver` restarted after the last common call."""
    if not stayer.before or not leaver.before:
        return True
    before = facts.loops(lines_of(leaver.before[-1]))
    inner = [loop for loop in facts.loops(leaver.lines) if loop in before and loop not in facts.loops(stayer.lines)]
    if not inner:
        return True
    previous, backward = backward_of(leaver.before[-1]), None if leaver.call is None else backward_of(leaver.call)
    if previous is not None and backward is not None and 0 <= previous.loader == backward.loader:
        return backward.batch[0] > previous.batch[0]
    runs = runs_of(facts, inner[0], leaver.before)
    return len(runs) > 1 and runs[-1] % min(runs[:-1]) == 0  # as many calls as in earlier runs


def runs_of(facts: EndingFacts, loop: Block, calls: Sequence[Call]) -> list[int]:
    """Count the calls per run of a loop; outside calls separate runs."""
    is_inside = {lines: loop in facts.loops(lines) for lines in {lines_of(call) for call in calls}}
    runs = [0]
    for call in calls:
        if is_inside[lines_of(call)]:
            runs[-1] += 1
        elif runs[-1]:
            runs.append(0)
    return [run for run in runs if run]


def _decided_alone(facts: EndingFacts, stayer: Position, leaver: Position, block: Block) -> list[Finding]:
    call = stayer.call
    assert call is not None
    number = next(index for index, other_call in enumerate(stayer.of.calls) if other_call is call)
    matching = [rank.rank for rank in facts.ranks if _makes_call(rank.calls, number, call)]
    calling = sorted({*matching, stayer.of.rank} - {leaver.of.rank})
    missing = [rank.rank for rank in facts.ranks if rank.rank not in calling]
    arms = {branch.head for branch in facts.around(leaver.lines, "branch") if not leaver.of.ended}
    is_arm = block.kind == "branch"
    instead = ", in the other branch of it" if block.head in arms else ""
    reason = f"each rank decides separately at {block.head}"
    fix = (
        f"Make the same decision on all ranks at {block.head}: all_reduce its input (the metric, the loss, a flag) "
        "before the test, or broadcast the decision of rank 0. "
        + (
            f"Or take {named(call)} out of the branch."
            if is_arm and call.operation != DDP_BACKWARD
            else f"Or reach {named(call)} on every rank."
        )
    )
    if block.kind == "try":
        reason = f"the `{block.word}` at {block.head} may have caught an exception that is not known, and skipped it"
        fix = (
            f"Have the `{block.word}` at {block.head} print the traceback and raise the exception again: torchrun then "
            f"ends all ranks. Or catch it at the raising line, so that this rank reaches {named(call)} nevertheless."
        )
    return one_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('reaches', 'reach', calling)} {described_call(call)}, "
        f"{in_words(block)}, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not in the same pass"
        f"{instead}: {told(facts, missing)}.",
        ranks=missing if len(missing) < len(calling) + (not is_arm) else calling,  # on a tie, the rank that jumped
        location=Location(block.path, block.line),
        evidence=[
            f"all of them have reached it before: {reason}",
            f"called from {', '.join(stayer.lines[1:4])}" if len(stayer.lines) > 1 else "",
            *calls_there(stayer, leaver),
        ],
        fix=fix,
    )


def _makes_call(calls: Sequence[Call], number: int, call: Call) -> bool:
    return (
        number < len(calls)
        and calls[number].operation == call.operation
        and calls[number].payload == call.payload
        and lines_of(calls[number]) == lines_of(call)
    )
