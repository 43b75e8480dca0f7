"""DDP508, 502 and 405: hangs because one rank skipped an iteration of a loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, one_finding, plural_verb
from ddpcheck.judge.endings.branch_endings import (
    EndingFacts,
    Position,
    backwards_of,
    exits_of,
    lines_of,
    loops_left,
    split_line,
    told,
)
from ddpcheck.judge.endings.loop_endings import FIX_OF_EXIT, may_leave_out, shard_in_words
from ddpcheck.stream.entries import DDP_FORWARD, Backward, backward_of

# Skipped backward pass or batch


def explain_by_skipped_pass(facts: EndingFacts, one: Position, other: Position) -> list[Finding]:
    """DDP508: skipped backward pass or batch; DDP502: unequal `no_sync` passes.

    Runs before loops, because a rank that skipped an iteration reaches the end of its loop earlier.
    """
    of_ranks = {rank.rank: backwards_of(rank) for rank in facts.ranks}
    every = [b.call for theirs in of_ranks.values() for b in theirs]
    if len({call.group for call in every}) != 1:
        return []
    for wrapper in sorted({call.payload for call in every}):
        own = {rank: [b for b in theirs if b.call.payload == wrapper] for rank, theirs in of_ranks.items()}
        if found := _skipped_of_wrapper(facts, {rank: theirs for rank, theirs in own.items() if theirs}):
            return found
    return []


def _skipped_of_wrapper(facts: EndingFacts, backwards: Mapping[int, Sequence[Backward]]) -> list[Finding]:
    if len(backwards) < 2:
        return []
    counts = {rank.rank: _begun(rank, backwards[rank.rank]) for rank in facts.ranks if rank.rank in backwards}
    most = max(counts.values())
    for number, of_ranks in enumerate(zip(*backwards.values(), strict=False)):
        if len({(b.forward, b.batch, b.unsynced) for b in of_ranks}) == 1 or len({b.line for b in of_ranks}) > 1:
            continue
        at = dict(zip(backwards, of_ranks, strict=True))
        for kind in ("unsynced", "forward", "batch"):
            values = {rank: getattr(b, kind) for rank, b in at.items()}
            least = min(values.values())
            ahead = [rank for rank, value in values.items() if value > least]
            if ahead and all(counts[rank] < most for rank in ahead):
                behind = next(b for rank, b in at.items() if rank not in ahead)
                if kind == "batch" and not _went_through(backwards, ahead, at, behind):
                    continue
                numbers = [f"rank {rank}, backward pass {number + 1}: of {b.call.place}" for rank, b in at.items()]
                block, why = _left_out_at(facts, behind, kind)
                why = [*why, "from then on, backward passes of different batches are averaged with each other"]
                return _dropped(facts, ahead, at, behind) or _skipped(
                    facts, kind, ahead, list(at), behind, block, [*numbers, *why]
                )
    return []


def _begun(rank: RankAtEnd, backwards: Sequence[Backward]) -> int:
    """Count the backward passes of a rank, plus a forward without backward."""
    last = backwards[-1]
    return len(backwards) + (rank.forwards.get(split_line(last.line)[1], 0) > last.forward)


def _went_through(
    backwards: Mapping[int, Sequence[Backward]], ahead: Sequence[int], at: Mapping[int, Backward], behind: Backward
) -> bool:
    """Return True if the `ahead` ranks trained on the loader pass of `behind`."""
    return all(
        at[rank].loader == behind.loader and any(b.batch[0] == behind.batch[0] for b in backwards[rank])
        for rank in ahead
    )


def _dropped(facts: EndingFacts, ahead: Sequence[int], at: Mapping[int, Backward], behind: Backward) -> list[Finding]:
    """DDP405: loader pass that a rank left before the last batch."""
    key = (behind.loader, behind.batch[0])
    gone = {rank.rank: p for rank in facts.ranks for p in rank.passes if (p.loader, p.number) == key}
    gone = {rank: gone[rank] for rank in ahead if rank in gone and at[rank].batch[0] > key[1]}
    if behind.loader < 0 or not gone or any(one.exhausted for one in gone.values()):
        return []
    others = [rank for rank in at if rank not in gone]
    first = next(iter(gone.values()))
    around = facts.blocks.get(str(first.location), ())
    loops = [loop for loop in around if loop.head == str(first.location)]
    exits = [*(loops[0].exits if loops else ()), *((one.line, one.word) for one in around if one.kind == "try")]
    where = Location(loops[0].path, exits[0][0]) if loops and len(exits) == 1 else None
    how = f" by the `{exits[0][1]}` at {where}" if where is not None else ""
    return one_finding(
        "DDP405",
        (first.dataset or "batches",),
        f"{format_ranks(gone).capitalize()} left the loop at {first.location}{how} in batch {first.batches}, and "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)} it: {told(facts, list(gone))}, "
        f"{told(facts, others)}.",
        ranks=list(gone),
        location=where or first.location,
        evidence=[
            *(f"the `{word}` at {loops[0].path}:{line} may end it" for line, word in exits if loops and not how),
            *(f"rank {rank}: then {one.call.place}" for rank, one in at.items()),
            *(f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks),
        ],
        fix=FIX_OF_EXIT,
    )


def _skipped(
    facts: EndingFacts,
    kind: str,
    ahead: Sequence[int],
    ranks: Sequence[int],
    behind: Backward,
    block: Block | None,
    why: Sequence[str],
) -> list[Finding]:
    others = [rank for rank in ranks if rank not in ahead]
    who, rest = format_ranks(ahead).capitalize(), format_ranks(others)
    batch = f"batch {behind.batch[1]}" if behind.loader >= 0 else f"forward pass {behind.forward}"
    line = behind.line if kind == "batch" else behind.call.location
    where = None if block is None else Location(block.path, block.line)
    evidence = [*why, *(f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks)]
    if kind == "unsynced":
        return one_finding(
            "DDP502",
            ("no_sync",),
            f"{who} {plural_verb('runs', 'run', ahead)} {batch} under no_sync, and {rest} "
            f"{plural_verb('does', 'do', others)} not: {rest} {plural_verb('averages', 'average', others)} its "
            f"gradients, {format_ranks(ahead)} {plural_verb('does', 'do', ahead)} not.",
            ranks=ahead,
            location=Location.parse(behind.line or line),
            evidence=evidence,
            fix="Enter no_sync for the same micro-batches on every rank: decide it by the number of the step.",
        )
    what = "the backward pass" if kind == "forward" else "the forward pass"
    by = f" (`{block.word}` at {block.head})" if block is not None else ""
    skipped = f"{what} of {batch}" if behind.loader >= 0 else (what if kind == "batch" else f"{what} of {batch}")
    return one_finding(
        "DDP508",
        ("backward",),
        f"{who} skipped {skipped}{f' at {line}' if line else ''}{by}; {rest} did not. The ranks are then out of step: "
        f"{told(facts, ahead)}, {told(facts, others)}.",
        ranks=ahead,
        location=where or Location.parse(line),
        evidence=evidence,
    )


def _left_out_at(facts: EndingFacts, done: Backward, kind: str) -> tuple[Block | None, list[str]]:
    """Return the block that skips an iteration, if unique, and all candidates in words."""
    lines = lines_of(done.call) if kind == "forward" else (done.line, *lines_of(done.call)[1:])
    frames = []
    for line in lines:
        frames.append(line)
        if facts.loops((line,)):
            break
    inner = facts.loops(frames[-1:])[-1:] if frames else []
    of_forward = facts.around((done.line,), "branch", "rest") if kind == "forward" else []
    found = [
        block
        for block in facts.around(frames, "branch", "rest", "try")
        if block not in of_forward and (not inner or block.path != inner[0].path or block.first > inner[0].first)
    ]
    jumps = [block for block in found if block.kind == "try" or (block.kind == "rest" and block.word != "raise")]
    likely = jumps or found
    return likely[0] if len(likely) == 1 else None, [may_leave_out(block) for block in found]


# Last iteration of a loop


def explain_by_skipped_end(facts: EndingFacts, left: Position, stays: Position) -> list[Finding]:
    """DDP508: skipped last backward pass of a loop, after batch or forward.

    Runs before loops, because such a rank seems to have left a loop early.
    """
    done = _pass_of(facts, stays)
    kind = "" if done is None else _left_out_by(facts, left, stays, done)
    if done is None or not kind:
        return []
    length, others = len(left.before), [rank for rank in facts.ranks if rank not in (left.of, stays.of)]
    then = [Position(rank, None, facts.now(rank), rank.calls[:length]) for rank in others]
    ahead = sorted([left.of.rank, *(one.of.rank for one in then if _left_out_by(facts, one, stays, done))])
    what = "batch" if kind == "batch" else "forward"
    block, why = _left_out_at(facts, done, what)
    passes = {rank.rank: _taken(rank, done) for rank in facts.ranks}
    batches = [f"rank {rank}: {shard_in_words(taken)}" for rank, taken in passes.items() if taken is not None]
    forwards = [f"rank {rank}: as many forward passes at {done.line}" for rank in ahead if kind == "forward"]
    block = None if kind == "unknown" else block
    return _skipped(facts, what, ahead, list(passes), done, block, [*batches, *forwards, *why])


def _pass_of(facts: EndingFacts, stays: Position) -> Backward | None:
    """Return the pending backward pass of a rank, or of its pending forward."""
    if stays.call is None:
        return None
    if stays.call.operation != DDP_FORWARD:
        return backward_of(stays.call)
    heads = {loop.head for loop in facts.loops(stays.lines)}
    taken = [one for one in stays.of.passes if str(one.location) in heads]
    if not taken:
        return None
    last = taken[-1]  # begun last, of any loader: one loop may iterate several loaders
    return Backward(stays.call, -1, line=stays.lines[0], batch=(last.number, last.batches), loader=last.loader)


def _taken(rank: RankAtEnd, done: Backward) -> LoaderPass | None:
    """Return the rank's loader pass with the batch of a backward pass."""
    return next((one for one in rank.passes if (one.loader, one.number) == (done.loader, done.batch[0])), None)


def _left_out_by(facts: EndingFacts, left: Position, stays: Position, done: Backward) -> str:
    """Return the part of the current iteration that `left` skipped.

    "forward": the backward pass after a forward pass; "batch": the forward pass; "unknown": either; "": the rank may
    have left the loop before.
    """
    loops = loops_left(facts, left, stays)
    if not loops or _has_as_many(left.of, stays) or not (left.lines or left.of.ended):
        return ""
    mine, theirs = next(_last_common(left, stays, done), (None, None))
    more = 0 if mine is None or theirs is None else mine.forward - theirs.forward
    made = left.of.forwards.get(split_line(done.line)[1]) if done.forward >= 0 else -1
    has_made = made is not None and 0 <= done.forward <= made - more
    taken = _taken(left.of, done)
    alike = mine is None or theirs is None or (mine.loader, mine.batch) == (theirs.loader, theirs.batch)
    has_had = alike and taken is not None and taken.batches >= done.batch[1]
    if taken is None or all(loop.head != str(taken.location) for loop in loops):  # may not be a loop over the loader
        has_had = has_had and theirs is not None and theirs.batch != done.batch
    goes_on = has_made and made is not None and made - more > done.forward
    if has_had and taken is not None:
        goes_on |= taken.exhausted or taken.batches > done.batch[1]
    if not goes_on and any(exits_of(facts, loop, left, stays) for loop in loops):
        return ""  # may have left during this iteration
    if has_made:
        return "forward"
    return ("unknown" if made is None else "batch") if has_had else ""


def _has_as_many(left: RankAtEnd, stays: Position) -> bool:
    """Return True if `left` made as many backward passes as `stays`."""
    if stays.call is None or (there := backward_of(stays.call)) is None:
        return False
    mine, theirs = (sum(one.line == there.line for one in backwards_of(rank)) for rank in (left, stays.of))
    return mine >= theirs


def _last_common(left: Position, stays: Position, done: Backward) -> Iterator[tuple[Backward, Backward]]:
    """Yield common backward passes of the same forward line, latest first."""
    for one, other in zip(reversed(left.before), reversed(stays.before), strict=False):
        mine, theirs = backward_of(one), backward_of(other)
        if mine is not None and theirs is not None and mine.line == theirs.line == done.line:
            yield mine, theirs
