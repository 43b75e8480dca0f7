"""Position of each rank at the end: last call, branches, loops and exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.wording import format_by_text, plural
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, JOINED, SHARD_FORWARD, Backward, backward_of, lines_in


def backwards_of(rank: RankAtEnd) -> list[Backward]:
    """Return the logged DDP backward passes (or sharded forward passes) of a rank."""
    return [backward for call in rank.calls if (backward := backward_of(call)) is not None]


@dataclass(frozen=True, slots=True)
class Position:
    """State of a rank at a divergence: its first different collective, and program lines."""

    state: RankAtEnd
    call: Call | None  # None if the rank reached no further collective
    lines: tuple[str, ...]
    before: Sequence[Call] = ()  # collectives common to both ranks, before the divergence

    @property
    def is_at_work(self) -> bool:
        """Return True if the rank is running and may still reach a collective."""
        return self.call is None and not self.state.waits and not self.state.ended


@dataclass(frozen=True, slots=True)
class EndingFacts:
    """Ranks of a hung job and the code blocks around their lines."""

    ranks: Sequence[RankAtEnd]  # all ranks, in order
    blocks: Mapping[str, Sequence[Block]]  # by 'path:line': enclosing blocks, outermost first

    @property
    def states(self) -> list[str]:
        """Evidence: what each rank does or did last."""
        return [f"rank {rank.rank}: {rank.doing}" for rank in self.ranks]

    def enclosing(self, lines: Sequence[str], *kinds: str) -> list[Block]:
        """Return code blocks (loops, branches, ...) of `kinds` around a stack's lines, outermost first."""
        return [block for line in reversed(lines) for block in self.blocks.get(line, ()) if block.kind in kinds]

    def loops(self, lines: Sequence[str]) -> list[Block]:
        """Return the loops around the lines of a stack, outermost first."""
        return self.enclosing(lines, "loop")

    def has_been_in(self, rank: RankAtEnd, block: Block) -> bool:
        """Return True if any collective that a rank has called was inside `block`."""
        return any(block in self.enclosing(lines, block.kind) for lines in {lines_of(call) for call in rank.calls})

    def was_in(self, side: Position, loop: Block) -> bool:
        """Check if the rank's last collective before the ranks diverged was called inside `loop`."""
        return bool(side.before) and loop in self.loops(lines_of(side.before[-1]))

    def current_stack(self, rank: RankAtEnd) -> tuple[str, ...]:
        """Return a rank's current stack, or if unknown, the lines of its last collective."""
        return rank.lines or (lines_of(rank.calls[-1]) if rank.calls and not rank.ended else ())


def lines_of(call: Call) -> tuple[str, ...]:
    """Return the stack of program lines that called a collective, innermost first."""
    return call.callers or ((call.location,) if call.location else ())


def loops_left(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Block]:
    """Return loops that contain rank `stayer` and that rank `leaver` has exited, outermost first."""
    leaver_loops = facts.loops(leaver.lines)
    return [loop for loop in facts.loops(stayer.lines) if loop not in leaver_loops and facts.was_in(leaver, loop)]


def exits_of(facts: EndingFacts, loop: Block, leaver: Position, stayer: Position) -> list[tuple[int, str]]:
    """Return (line, keyword) of the statements by which `leaver` may have left `loop` early.

    These are statements such as `break`, and each `try` around the loop that only `stayer` is still in.
    """
    exited = [] if leaver.state.ended else facts.enclosing(leaver.lines, "try")
    tries = [] if leaver.state.ended else [b for b in facts.enclosing(stayer.lines, "try") if b not in exited]
    enclosing = [b for b in tries if b.path == loop.path and b.first <= loop.first and b.last >= loop.last]
    return [*loop.exits, *((b.line, b.word) for b in enclosing)]


def local_branches(facts: EndingFacts, position: Position, peer: Position) -> list[Block]:
    """Return the branches that `position` is in and `peer` never entered, innermost first.

    The statements after an early exit (`return`, `break`, `raise`) count as a branch, last in the list, if `peer` is
    outside of the function or loop that the exit leaves. The list is empty if `peer` is in a loop that `position` has
    left, since `peer` may still reach the branch.
    """
    if loops_left(facts, position, peer) and not set(facts.loops(position.lines)) & set(facts.loops(peer.lines)):
        return []
    peer_blocks = facts.enclosing(peer.lines, "branch", "rest", "function", "loop")
    scopes = {"return": "function", "break": "loop", "raise": "function"}
    branches = []
    for block in dict.fromkeys(
        reversed(facts.enclosing(position.lines, "branch", "rest"))
    ):  # comprehensions have frames
        outer = facts.enclosing(position.lines, scopes.get(block.word, "")) if block.kind == "rest" else []
        exited = [b for b in outer if b.path == block.path and b.first <= block.first and b.last >= block.last][-1:]
        if block not in peer_blocks and not set(exited) & set(peer_blocks) and not facts.has_been_in(peer.state, block):
            branches.append(block)
    return sorted(branches, key=lambda block: block.kind == "rest")


def describe_call(call: Call) -> str:
    """Describe a call with its line: "all_reduce at train.py:9"."""
    return f"{op_name(call)}{f' at {call.location}' if call.location else ''}"


def op_name(call: Call) -> str:
    """Return the display name of a call."""
    return _DISPLAY_NAMES.get(call.operation, call.operation)


_DISPLAY_NAMES = {
    DDP_BACKWARD: "backward",
    DDP_FORWARD: "the forward of DistributedDataParallel",
    SHARD_FORWARD: "the forward of the sharded module",
}


def describe_ranks(facts: EndingFacts, ranks: Sequence[int]) -> str:
    """Describe what each of `ranks` does."""
    return ", ".join(format_by_text((rank.rank, rank.doing) for rank in facts.ranks if rank.rank in ranks))


def divergence_evidence(position: Position, peer: Position) -> list[str]:
    """Return evidence: the diverging collective and the final state of each rank."""
    sides = sorted((position, peer), key=lambda side: side.state.rank)
    return [
        *(
            f"rank {side.state.rank} reaches {side.call or 'no further collective'}"
            for side in sides
            if side.call is not None
            or side.state.ended
            or not side.state.waits  # else it waits in an unlogged collective
        ),
        *(f"rank {side.state.rank}: {side.state.doing}" for side in sides),
    ]


def describe_loader_pass(loader_pass: LoaderPass) -> str:
    """Describe a rank's pass over its data shard by numbers of batches and samples."""
    size = len(loader_pass.indices) if loader_pass.exhausted and loader_pass.indices else -1
    words = f"{plural(loader_pass.batches, 'batch')}{'' if loader_pass.exhausted else ' so far'}"
    if loader_pass.expected >= 0 and not loader_pass.exhausted:
        words += f" of {loader_pass.expected}"
    if size >= 0:
        words += f", {plural(size, 'sample')}"
    elif loader_pass.size >= 0:
        words += f", of a dataset of {plural(loader_pass.size, 'sample')}"
    return f"{words}, {loader_pass.batch_size} to a batch" if loader_pass.batch_size > 1 else words


def count_visits(rank: RankAtEnd, call: Call) -> int:
    """Count how often a rank made the same call at the same program lines.

    If `call` is a DDP forward pass, but the log has no forward passes, count all log entries of its line instead.
    """
    forward = call.operation == DDP_FORWARD and all(logged.operation != DDP_FORWARD for logged in rank.calls)
    return sum(
        call.location in lines_in(logged.place)
        if forward
        else lines_of(logged) == lines_of(call) and logged.operation == call.operation
        for logged in rank.calls
    )


def describe_skipping_block(block: Block) -> str:
    """Describe a block, such as an `if`, that may skip calls on a rank."""
    return f"the `{block.word}` at {block.head} may leave it out"


def has_joined(rank: RankAtEnd) -> bool:
    """Return True if a rank ran out of batches and shadows collectives under `Join`."""
    return bool(rank.calls) and rank.calls[-1].place == JOINED


def call_sequence(rank: RankAtEnd) -> tuple[object, ...]:
    return tuple((call.operation, call.group, call.payload, lines_of(call)) for call in rank.calls)


SEND_ORDER = (
    "Let one of two ranks send first and the other one receive first (if rank % 2: ...), or start both directions "
    "together: batch_isend_irecv([P2POp(isend, ...), P2POp(irecv, ...)]), and wait for all of them after that."
)

GROUP_ORDER = "Have every rank call the collectives of its process groups in the same order."
