"""The facts on ranks that do not come together any more: where they part, and what each did before; in words.

What a rank did is known by the lines that led to each of its collectives, by its passes over data loaders, and by the
blocks of the program around these lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.wording import agreeing, told_together
from ddpcheck.stream.places import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, Backward, backward_of


def backwards_of(rank: RankAtEnd) -> list[Backward]:
    """The backward passes of a rank that DDP has averaged, or its forward passes of shards, where they are known."""
    return [found for call in rank.calls if (found := backward_of(call)) is not None]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is when it and another one part: the collective that it has come to, or what it does instead.

    `before` are the collectives that the two have made together.
    """

    of: RankAtEnd
    call: Call | None
    lines: tuple[str, ...]
    before: Sequence[Call] = ()


@dataclass(frozen=True, slots=True)
class EndingFacts:
    """The facts on ranks that do not come together any more.

    Attributes:
        ranks: All of them, in order.
        blocks: Of the program, around each line at which a rank was; outermost first.
    """

    ranks: Sequence[RankAtEnd]
    blocks: Mapping[str, Sequence[Block]]

    def around(self, lines: Sequence[str], *kinds: str) -> list[Block]:
        """The blocks around lines of a stack, outermost first."""
        return [one for line in reversed(lines) for one in self.blocks.get(line, ()) if one.kind in kinds]

    def loops(self, lines: Sequence[str]) -> list[Block]:
        """The loops that run at lines of a stack, outermost first."""
        return self.around(lines, "loop")

    def has_been_in(self, rank: RankAtEnd, block: Block) -> bool:
        """Whether a collective of a rank was made in a block."""
        return any(block in self.around(lines, block.kind) for lines in {lines_of(call) for call in rank.calls})

    def has_left(self, side: Position, loop: Block) -> bool:
        """Whether a rank was in a loop before it and another one parted; what it called there since tells nothing."""
        return any(loop in self.around(lines, loop.kind) for lines in {lines_of(call) for call in side.before})

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


def own_branches(facts: EndingFacts, one: Position, other: Position) -> list[Block]:
    """The branches in which `one` is, and the other rank neither is nor has made a collective; innermost first.

    What comes after an early exit is one, too, and stands last, where the other rank may have left by it: it is not in
    the function or the loop that this leaves.
    """
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
    return (
        f"in the branch at {branch.head}" if branch.kind == "branch" else f"past the `{branch.word}` at {branch.head}"
    )


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
        *(f"rank {side.of.rank} comes to {side.call or 'no collective any more'}" for side in sides),
        *(f"rank {side.of.rank}: {side.of.doing}" for side in sides),
    ]
