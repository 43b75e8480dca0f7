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
    return [found for call in rank.calls if (found := backward_of(call)) is not None]


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
        return [one for line in reversed(lines) for one in self.blocks.get(line, ()) if one.kind in kinds]

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


def loops_left(facts: EndingFacts, left: Position, stays: Position) -> list[Block]:
    """Return the loops that `left` has exited and `stays` is in, outermost first."""
    gone = facts.loops(left.lines)
    return [loop for loop in facts.loops(stays.lines) if loop not in gone and facts.has_left(left, loop)]


def exits_of(facts: EndingFacts, loop: Block, left: Position, stays: Position) -> list[tuple[int, str]]:
    """Return (line, word) of each early exit from a loop, including enclosing `try` blocks."""
    gone = [] if left.of.ended else facts.around(left.lines, "try")
    tries = [] if left.of.ended else [one for one in facts.around(stays.lines, "try") if one not in gone]
    around = [one for one in tries if one.path == loop.path and one.first <= loop.first and one.last >= loop.last]
    return [*loop.exits, *((one.line, one.word) for one in around)]


def own_branches(facts: EndingFacts, one: Position, other: Position) -> list[Block]:
    """Return the branches that `one` is in and `other` never entered, innermost first.

    Code after an early exit counts as a branch and comes last, if `other` is outside of the function or loop that the
    exit leaves. Empty if `other` is still in a loop that `one` has left, and may reach the branch later.
    """
    if loops_left(facts, one, other) and not set(facts.loops(one.lines)) & set(facts.loops(other.lines)):
        return []
    theirs = facts.around(other.lines, "branch", "rest", "function", "loop")
    left = {"return": "function", "break": "loop", "raise": "function"}
    found = []
    for block in dict.fromkeys(reversed(facts.around(one.lines, "branch", "rest"))):  # comprehensions have frames
        around = facts.around(one.lines, left.get(block.word, "")) if block.kind == "rest" else []
        leaves = [b for b in around if b.path == block.path and b.first <= block.first and b.last >= block.last][-1:]
        if block not in theirs and not set(leaves) & set(theirs) and not facts.has_been_in(other.of, block):
            found.append(block)
    return sorted(found, key=lambda block: block.kind == "rest")


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


def calls_there(one: Position, other: Position) -> list[str]:
    """Return evidence: the diverging collective and the final state of each rank."""
    sides = sorted((one, other), key=lambda side: side.of.rank)
    return [
        *(
            f"rank {side.of.rank} reaches {side.call or 'no further collective'}"
            for side in sides
            if side.call is not None or side.of.ended or not side.of.waits  # else it waits in an unlogged collective
        ),
        *(f"rank {side.of.rank}: {side.of.doing}" for side in sides),
    ]


def explain_by_exception(facts: EndingFacts, raised: Position, goes_on: Position) -> list[Finding]:
    """DDP401: collective in a `finally` or `except`. Runs early: it resembles other causes."""
    error = handled_in(raised.call) if raised.call is not None else None
    if raised.call is None or error is None:
        return []
    kind, where, text = error
    if goes_on.call is not None and (theirs := handled_in(goes_on.call)) is not None and theirs[:2] == (kind, where):
        return []
    said = f"{kind}{f': {text}' if text else ''}"
    others = [rank.rank for rank in facts.ranks if rank is not raised.of]
    return one_finding(
        "DDP401",
        ("run",),
        f"Rank {raised.of.rank} raised {said.rstrip('.')}{f', at {where}' if where else ''}, and reaches "
        f"{described_call(raised.call)} in the `finally` or `except` that handles it; {told(facts, others)}.",
        severity=Severity.ERROR,
        ranks=[raised.of.rank],
        location=Location.parse(where or raised.call.location),
        evidence=calls_there(raised, goes_on),
        fix=f"Fix the exception{f' at {where}' if where else ''}. Call no collective in a `finally` or `except` that a "
        f"single rank may reach ({described_call(raised.call)}): if the exception ends the rank, torchrun ends the "
        "others.",
    )


def explain_by_branch(facts: EndingFacts, stays: Position, leaves: Position) -> list[Finding]:
    """DDP403: branch that one rank takes and another skips in the same iteration.

    Both have taken it before. Runs before loops, because a rank in the next outer iteration has left inner loops, too.
    """
    if stays.call is None or leaves.is_at_work:
        return []  # a running rank may still reach it
    for block in _left_out(facts, stays, leaves):
        around = facts.around(stays.lines, "loop", block.kind)
        loops = [outer for outer in around[: around.index(block)] if outer.kind == "loop"]
        is_own = block.kind != "try" or loops == facts.loops(stays.lines)  # else the exception exits an inner loop
        if loops and is_own and _is_same_pass(facts, loops[-1], block, stays, leaves):
            return _decided_alone(facts, stays, leaves, block)
    return []


def _left_out(facts: EndingFacts, stays: Position, leaves: Position) -> list[Block]:
    """Return blocks that `stays` is in and `leaves` was in earlier, innermost first."""
    theirs = facts.around(leaves.lines, "branch", "rest", "try")
    mine = reversed(facts.around(stays.lines, "branch", "rest", "try"))
    return [block for block in mine if block not in theirs and facts.has_been_in(leaves.of, block)]


def _is_same_pass(facts: EndingFacts, loop: Block, block: Block, stays: Position, leaves: Position) -> bool:
    """Return True if `leaves` skipped the block in the same iteration of the loop.

    False if an exit between the last common call and the block may have been taken.
    """
    before = lines_of(stays.before[-1]) if stays.before else ()
    if loop in facts.loops(leaves.lines):
        return _comes_first(stays.lines, leaves.lines, before) and _is_anew(facts, stays, leaves)
    was_in_it = loop in facts.loops(before)
    exits = exits_of(facts, loop, leaves, stays)
    start = next((split_line(line)[1] for line in before if loop in facts.blocks.get(line, ())), 0)
    if was_in_it and any((line, word) not in loop.exits or start < line < block.line for line, word in exits):
        return False
    if was_in_it and _comes_first(before, stays.lines, ()):  # so this iteration has begun
        return True
    assert stays.call is not None
    ends_by_itself = loop.word == "for" and not exits
    of_loader = any(str(one.location) == loop.head for rank in facts.ranks for one in rank.passes)
    return ends_by_itself and not of_loader and stays.call.operation not in (DDP_FORWARD, *PASSES)


def _comes_first(one: Sequence[str], other: Sequence[str], before: Sequence[str]) -> bool:
    """Return True if a program at `before` reaches `one` before `other`; innermost lines first.

    In a loop, lines above `before` belong to the next iteration.
    """
    here, there, last = (tuple(reversed(lines)) for lines in (one, other, before))
    for depth, (mine, theirs) in enumerate(zip(here, there, strict=False)):
        if mine != theirs:
            (path, a), (of_other, b) = split_line(mine), split_line(theirs)
            known = len(last) > depth and last[:depth] == here[:depth] and split_line(last[depth])[0] == path
            start = split_line(last[depth])[1] if known else 0
            return path == of_other and (a <= start, a) < (b <= start, b)
    return len(here) > len(there)


def _is_anew(facts: EndingFacts, stays: Position, leaves: Position) -> bool:
    """Return True if the inner loop of `leaves` restarted after the last common call."""
    if not stays.before or not leaves.before:
        return True
    before = lines_of(leaves.before[-1])
    inner = [
        one for one in facts.loops(leaves.lines) if one not in facts.loops(stays.lines) and one in facts.loops(before)
    ]
    if not inner:
        return True
    last, now = backward_of(leaves.before[-1]), None if leaves.call is None else backward_of(leaves.call)
    if last is not None and now is not None and 0 <= last.loader == now.loader:
        return now.batch[0] > last.batch[0]
    runs = runs_of(facts, inner[0], leaves.before)
    return len(runs) > 1 and runs[-1] % min(runs[:-1]) == 0  # as many calls as in earlier runs


def runs_of(facts: EndingFacts, loop: Block, calls: Sequence[Call]) -> list[int]:
    """Count the calls per run of a loop; outside calls separate runs."""
    inside = {lines: loop in facts.loops(lines) for lines in {lines_of(call) for call in calls}}
    runs = [0]
    for call in calls:
        if inside[lines_of(call)]:
            runs[-1] += 1
        elif runs[-1]:
            runs.append(0)
    return [run for run in runs if run]


def _decided_alone(facts: EndingFacts, stays: Position, leaves: Position, block: Block) -> list[Finding]:
    call = stays.call
    assert call is not None
    number = next(at for at, one in enumerate(stays.of.calls) if one is call)
    alike = [rank.rank for rank in facts.ranks if _calls(rank.calls, number, call)]
    calling = sorted({*alike, stays.of.rank} - {leaves.of.rank})
    missing = [rank.rank for rank in facts.ranks if rank.rank not in calling]
    arms = {one.head for one in facts.around(leaves.lines, "branch") if not leaves.of.ended}
    is_arm = block.kind == "branch"
    instead = ", in the other branch of it" if block.head in arms else ""
    by_itself = f"each rank decides separately at {block.head}"
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
        by_itself = f"the `{block.word}` at {block.head} may have caught an exception that is not known, and skipped it"
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
            f"all of them have reached it before: {by_itself}",
            f"called from {', '.join(stays.lines[1:4])}" if len(stays.lines) > 1 else "",
            *calls_there(stays, leaves),
        ],
        fix=fix,
    )


def _calls(calls: Sequence[Call], number: int, call: Call) -> bool:
    return (
        number < len(calls)
        and calls[number].operation == call.operation
        and calls[number].payload == call.payload
        and lines_of(calls[number]) == lines_of(call)
    )
