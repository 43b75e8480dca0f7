"""DDP401 and 403: ranks that wait for each other since one handles an exception, or has decided by itself.

Also what the other judges of an ending ask of it: where ranks part, in which blocks of the program each is, in words.
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
    """The backward passes of a rank that DDP has averaged, or its forward passes of shards, where they are known."""
    return [found for call in rank.calls if (found := backward_of(call)) is not None]


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a rank at the divergence: its collective, or what it does instead."""

    of: RankAtEnd
    call: Call | None
    lines: tuple[str, ...]
    before: Sequence[Call] = ()  # the collectives that the two have made together

    @property
    def is_at_work(self) -> bool:
        """Check if it may still come to something."""
        return self.call is None and not self.of.waits and not self.of.ended


@dataclass(frozen=True, slots=True)
class EndingFacts:
    """The facts on ranks that do not come together any more."""

    ranks: Sequence[RankAtEnd]  # all of them, in order
    blocks: Mapping[str, Sequence[Block]]  # of the program, around each line at which a rank was; outermost first

    def around(self, lines: Sequence[str], *kinds: str) -> list[Block]:
        """The blocks around lines of a stack, outermost first."""
        return [one for line in reversed(lines) for one in self.blocks.get(line, ()) if one.kind in kinds]

    def loops(self, lines: Sequence[str]) -> list[Block]:
        """The loops that run at lines of a stack, outermost first."""
        return self.around(lines, "loop")

    def has_been_in(self, rank: RankAtEnd, block: Block) -> bool:
        """Check if a collective of a rank was made in a block."""
        return any(block in self.around(lines, block.kind) for lines in {lines_of(call) for call in rank.calls})

    def has_left(self, side: Position, loop: Block) -> bool:
        """Check if a rank was in a loop when it and another one have made the last call together."""
        return bool(side.before) and loop in self.loops(lines_of(side.before[-1]))

    def now(self, rank: RankAtEnd) -> tuple[str, ...]:
        """Where a rank stands."""
        return rank.lines or (lines_of(rank.calls[-1]) if rank.calls and not rank.ended else ())


def lines_of(call: Call) -> tuple[str, ...]:
    """The lines of the program that led to a collective, innermost first."""
    return call.callers or ((call.location,) if call.location else ())


def split_line(line: str) -> tuple[str, int]:
    """The path and the number of a line of the program; -1 where it is not known."""
    path, _, number = line.rpartition(":")
    return path, int(number or -1)


def loops_left(facts: EndingFacts, left: Position, stays: Position) -> list[Block]:
    """The loops in which a rank is, and in which the other one was before they parted, and is not; outermost first."""
    gone = facts.loops(left.lines)
    return [loop for loop in facts.loops(stays.lines) if loop not in gone and facts.has_left(left, loop)]


def exits_of(facts: EndingFacts, loop: Block, left: Position, stays: Position) -> list[tuple[int, str]]:
    """The lines by which a rank may have left a loop before its end, each with its word."""
    gone = [] if left.of.ended else facts.around(left.lines, "try")
    tries = [] if left.of.ended else [one for one in facts.around(stays.lines, "try") if one not in gone]
    around = [one for one in tries if one.path == loop.path and one.first <= loop.first and one.last >= loop.last]
    return [*loop.exits, *((one.line, one.word) for one in around)]


def own_branches(facts: EndingFacts, one: Position, other: Position) -> list[Block]:
    """The branches in which `one` is, and the other rank neither is nor has made a collective; innermost first.

    What comes after an early exit is one, too, and stands last, where the other rank may have left by it: it is not in
    the function or the loop that this leaves. None is a branch to which the other rank has not come, since it is in a
    loop that `one` has left before.
    """
    if loops_left(facts, one, other) and not set(facts.loops(one.lines)) & set(facts.loops(other.lines)):
        return []
    theirs = facts.around(other.lines, "branch", "rest", "function", "loop")
    left = {"return": "function", "break": "loop", "raise": "function"}
    found = []
    for block in dict.fromkeys(reversed(facts.around(one.lines, "branch", "rest"))):  # a comprehension has a frame, too
        around = facts.around(one.lines, left.get(block.word, "")) if block.kind == "rest" else []
        leaves = [b for b in around if b.path == block.path and b.first <= block.first and b.last >= block.last][-1:]
        if block not in theirs and not set(leaves) & set(theirs) and not facts.has_been_in(other.of, block):
            found.append(block)
    return sorted(found, key=lambda block: block.kind == "rest")


# Words


def described_call(call: Call) -> str:
    """A call with its line."""
    return f"{named(call)}{f' at {call.location}' if call.location else ''}"


def in_words(branch: Block) -> str:
    """Where what is in a branch stands, or past an early exit."""
    where = {"branch": "in the branch", "try": f"in the block that the `{branch.word}` cuts short"}
    return f"{where.get(branch.kind, f'past the `{branch.word}`')} at {branch.head}"


def named(call: Call) -> str:
    """What a call is to a reader."""
    return _NAMES.get(call.operation, call.operation)


_NAMES = {
    DDP_BACKWARD: "backward",
    DDP_FORWARD: "the forward of DistributedDataParallel",
    SHARD_FORWARD: "the forward of the sharded module",
}


def and_told(facts: EndingFacts, ranks: Sequence[int]) -> str:
    """The end of a sentence on ranks that says what they do."""
    doing = {rank.doing for rank in facts.ranks if rank.rank in ranks}
    return f" and {agreeing(doing.pop(), ranks)}" if len(doing) == 1 else f" ({told(facts, ranks)})"


def told(facts: EndingFacts, ranks: Sequence[int]) -> str:
    """What ranks do, in words."""
    return ", ".join(told_together((rank.rank, rank.doing) for rank in facts.ranks if rank.rank in ranks))


def calls_there(one: Position, other: Position) -> list[str]:
    """The collectives at which two ranks part, and what each does at the end."""
    sides = sorted((one, other), key=lambda side: side.of.rank)
    return [
        *(
            f"rank {side.of.rank} reaches {side.call or 'no further collective'}"
            for side in sides
            if side.call is not None or side.of.ended or not side.of.waits  # else in one that is in no log
        ),
        *(f"rank {side.of.rank}: {side.of.doing}" for side in sides),
    ]


def explain_by_exception(facts: EndingFacts, raised: Position, goes_on: Position) -> list[Finding]:
    """DDP401: a rank has raised, and its `finally` or `except` calls a collective. Before all that this looks like."""
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
    """DDP403: a rank takes a branch that another one, in the same pass of a loop, does not; both have taken it before.

    Before loops, for a rank that has gone on to the next pass of an outer loop is behind the inner ones as well.
    """
    if stays.call is None or leaves.is_at_work:
        return []  # one that is at work may still come to it
    for block in _left_out(facts, stays, leaves):
        around = facts.around(stays.lines, "loop", block.kind)
        loops = [outer for outer in around[: around.index(block)] if outer.kind == "loop"]
        is_own = block.kind != "try" or loops == facts.loops(stays.lines)  # else what it cuts short is a loop in it
        if loops and is_own and _is_same_pass(facts, loops[-1], block, stays, leaves):
            return _decided_alone(facts, stays, leaves, block)
    return []


def _left_out(facts: EndingFacts, stays: Position, leaves: Position) -> list[Block]:
    """The blocks in which a rank is, and in which the other has been before and is not now; innermost first."""
    theirs = facts.around(leaves.lines, "branch", "rest", "try")
    mine = reversed(facts.around(stays.lines, "branch", "rest", "try"))
    return [block for block in mine if block not in theirs and facts.has_been_in(leaves.of, block)]


def _is_same_pass(facts: EndingFacts, loop: Block, block: Block, stays: Position, leaves: Position) -> bool:
    """Check if the other rank has left out what this one is in, in the same pass of a loop, and not left the loop.

    It may have left the loop before that: by an exit between the last common call and what this one is in.
    """
    before = lines_of(stays.before[-1]) if stays.before else ()
    if loop in facts.loops(leaves.lines):
        return _comes_first(stays.lines, leaves.lines, before) and _is_anew(facts, stays, leaves)
    was_in_it = loop in facts.loops(before)
    exits = exits_of(facts, loop, leaves, stays)
    start = next((split_line(line)[1] for line in before if loop in facts.blocks.get(line, ())), 0)
    if was_in_it and any((line, word) not in loop.exits or start < line < block.line for line, word in exits):
        return False
    if was_in_it and _comes_first(before, stays.lines, ()):  # so it has begun this pass
        return True
    assert stays.call is not None
    ends_by_itself = loop.word == "for" and not exits
    of_loader = any(str(one.location) == loop.head for rank in facts.ranks for one in rank.passes)
    return ends_by_itself and not of_loader and stays.call.operation not in (DDP_FORWARD, *PASSES)


def _comes_first(one: Sequence[str], other: Sequence[str], before: Sequence[str]) -> bool:
    """Check if a program that was at `before` comes to `one` before it comes to `other`; innermost lines first.

    In a loop, what stands above `before` is in the next pass.
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
    """Check if the inner loop in which a rank is has begun again since the call that both have made before."""
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
    return len(runs) > 1 and runs[-1] % min(runs[:-1]) == 0  # as many as in passes before


def runs_of(facts: EndingFacts, loop: Block, calls: Sequence[Call]) -> list[int]:
    """How many calls were made in a loop, each time that it ran, as far as other calls tell these times apart."""
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
        ranks=missing if len(missing) < len(calling) + (not is_arm) else calling,  # who jumps is the odd one of two
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
