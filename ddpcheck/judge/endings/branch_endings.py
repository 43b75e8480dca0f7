"""DDP401 and 403: ranks that wait for each other since one handles an exception, or has decided by itself."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, one_finding, plural_verb
from ddpcheck.judge.endings.ending_facts import (
    EndingFacts,
    Position,
    calls_there,
    described_call,
    in_words,
    lines_of,
    named,
    split_line,
    told,
)
from ddpcheck.stream.places import DDP_BACKWARD, DDP_FORWARD, PASSES, backward_of, handled_in


def explain_by_exception(facts: EndingFacts, one: Position, other: Position) -> list[Finding]:
    """DDP401: a rank has raised, and its `finally` or `except` calls a collective. Before all that this looks like."""
    for raised, goes_on in ((one, other), (other, one)):
        error = handled_in(raised.call) if raised.call is not None else None
        if raised.call is None or error is None:
            continue
        kind, where, text = error
        if (
            goes_on.call is not None
            and (theirs := handled_in(goes_on.call)) is not None
            and theirs[:2] == (kind, where)
        ):
            continue
        said = f"{kind}{f': {text}' if text else ''}"
        others = [rank.rank for rank in facts.ranks if rank is not raised.of]
        return one_finding(
            "DDP401",
            ("run",),
            f"Rank {raised.of.rank} raised {said.rstrip('.')}{f', at {where}' if where else ''}, and comes to "
            f"{described_call(raised.call)} in the `finally` or `except` that handles it; {told(facts, others)}.",
            severity=Severity.ERROR,
            ranks=[raised.of.rank],
            location=Location.parse(where or raised.call.location),
            evidence=calls_there(one, other),
            fix=(
                f"Mend what raises{f' at {where}' if where else ''}. And call no collective in a `finally` or an "
                f"`except`, which one rank alone may come to ({described_call(raised.call)}): an exception that ends "
                "the rank has torchrun end the others."
            ),
        )
    return []


def explain_by_branch(facts: EndingFacts, one: Position, other: Position) -> list[Finding]:
    """DDP403: a rank takes a branch that another one, in the same pass of a loop, does not; both have taken it before.

    Before loops, for a rank that has gone on to the next pass of an outer loop is behind the inner ones as well.
    """
    for stays, leaves in ((one, other), (other, one)):
        at_work = leaves.call is None and not leaves.of.waits and not leaves.of.ended
        if stays.call is None or at_work:
            continue  # one that is at work may still come to it
        for block in _left_out(facts, stays, leaves):
            loops = _loops_around(facts, stays, block)
            if loops and _is_same_pass(facts, loops[-1], stays, leaves):
                return _decided_alone(facts, stays, leaves, block)
    return []


def _left_out(facts: EndingFacts, stays: Position, leaves: Position) -> list[Block]:
    """The blocks in which a rank is, and in which the other has been before and is not now; innermost first."""
    theirs = facts.around(leaves.lines, "branch", "rest")
    mine = reversed(facts.around(stays.lines, "branch", "rest"))
    return [block for block in mine if block not in theirs and facts.has_been_in(leaves.of, block)]


def _loops_around(facts: EndingFacts, at: Position, block: Block) -> list[Block]:
    around = facts.around(at.lines, "loop", block.kind)
    return [one for one in around[: around.index(block)] if one.kind == "loop"]


def _is_same_pass(facts: EndingFacts, loop: Block, stays: Position, leaves: Position) -> bool:
    """Whether the other rank has left out what this one is in, in the same pass of a loop, and not left the loop."""
    before = lines_of(stays.before[-1]) if stays.before else ()
    if loop in facts.loops(leaves.lines):
        return _comes_first(stays.lines, leaves.lines, before) and _is_anew(facts, stays, leaves)
    was_in_it = loop in facts.loops(before)
    if was_in_it and _comes_first(before, stays.lines, ()):  # so it has begun this pass
        return True
    assert stays.call is not None
    ends_by_itself = loop.word == "for" and not loop.exits and not facts.around(stays.lines, "try")
    of_loader = any(str(one.location) == loop.head for rank in facts.ranks for one in rank.passes)
    return ends_by_itself and not of_loader and stays.call.operation not in (DDP_FORWARD, *PASSES)


def _comes_first(one: Sequence[str], other: Sequence[str], before: Sequence[str]) -> bool:
    """Whether a program that was at `before` comes to `one` before it comes to `other`; innermost lines first.

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
    """Whether the inner loop in which a rank is has begun again since the call that both have made before."""
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
    runs = _runs(facts, inner[0], leaves.before)
    if inner[0].times is not None and inner[0].times > 0 and not leaves.of.earlier and len(inner) == 1:
        made = [call for call in leaves.before[-runs[-1] :] if lines_of(call) == before]
        return len(made) % inner[0].times == 0
    return len(runs) > 1 and runs[-1] % min(runs[:-1]) == 0  # as many as in passes before


def _runs(facts: EndingFacts, loop: Block, calls: Sequence[Call]) -> list[int]:
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
    return one_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('comes', 'come', calling)} to {described_call(call)}, "
        f"{in_words(block)}, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not in the same pass"
        f"{instead}: {told(facts, missing)}.",
        ranks=missing if len(missing) < len(calling) + (not is_arm) else calling,  # who jumps is the odd one of two
        location=Location(block.path, block.line),
        evidence=[
            f"all of them have come to it before: each rank decides at {block.head} by itself",
            *([f"called from {', '.join(stays.lines[1:4])}"] if len(stays.lines) > 1 else []),
            *calls_there(stays, leaves),
        ],
        fix=(
            f"Let all ranks decide alike at {block.head}: all_reduce what decides it (the metric, the loss, a flag) "
            "before the test, or broadcast the decision of rank 0. "
            + (
                f"Or take {named(call)} out of the branch."
                if is_arm and call.operation != DDP_BACKWARD
                else f"Or come to {named(call)} on every rank."
            )
        ),
    )


def _calls(calls: Sequence[Call], number: int, call: Call) -> bool:
    return (
        number < len(calls)
        and calls[number].operation == call.operation
        and calls[number].payload == call.payload
        and lines_of(calls[number]) == lines_of(call)
    )
