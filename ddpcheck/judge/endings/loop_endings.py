"""DDP403, 405, 508: hangs because one rank made fewer iterations of a loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import ENDLESS, Block
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, one_finding, plural_verb
from ddpcheck.judge.endings.branch_endings import (
    EndingFacts,
    Position,
    and_told,
    backwards_of,
    calls_there,
    described_call,
    exits_of,
    lines_of,
    loops_left,
    named,
    own_branches,
    runs_of,
    told,
)
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, JOINED, JOINING, SHARD_FORWARD, lines_in

# Data loader with fewer batches


def explain_by_loader(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP405: data loader with fewer batches on a rank. Runs early: other symptoms follow."""
    if any(map(has_joined, facts.ranks)):
        return []
    by_rank = {rank.rank: {(p.loader, p.number): p for p in rank.passes} for rank in facts.ranks}
    for key in sorted(set.intersection(*(set(passes) for passes in by_rank.values())), key=lambda key: key[::-1]):
        passes = {rank: rank_passes[key] for rank, rank_passes in by_rank.items()}
        if len({p.location for p in passes.values()}) > 1 or not _has_parted(facts, key, passes):
            continue
        fewest = min(p.batches for p in passes.values() if p.exhausted)
        short = [rank for rank, p in passes.items() if p.exhausted and p.batches == fewest]
        longer = [rank for rank, p in passes.items() if p.batches > fewest]
        first = passes[short[0]]
        return one_finding(
            "DDP405",
            (first.dataset or "batches",),
            f"The loader has {counted(fewest, 'batch')} on {format_ranks(short)}, and "
            f"{format_ranks(longer)} {plural_verb('takes', 'take', longer)} batch {fewest + 1}: "
            f"{told(facts, short)}, {told(facts, longer)}.",
            ranks=short if len(short) <= len(longer) else longer,
            location=first.location,
            evidence=[
                *(f"rank {rank}: {shard_in_words(loader_pass)}" for rank, loader_pass in passes.items()),
                *(f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks),
            ],
            fix=_fix_of_loader(facts),
        )
    return []


def _fix_of_loader(facts: EndingFacts) -> str:
    """Return the fix for uneven batches; `Join` is for DDP only."""
    sharded = any(call.operation == SHARD_FORWARD for rank in facts.ranks for call in rank.calls)
    join = (
        " Or enter `with Join([model]):` around the loop, so that a rank that has left the loop still answers the "
        "reductions of the others."
    )
    return (
        "Give every rank the same number of batches: DistributedSampler pads the shards (drop_last=True cuts them); "
        f"for shards that are made by hand, cut each to the length of the shortest one.{'' if sharded else join}"
    )


def _has_parted(facts: EndingFacts, key: tuple[int, int], passes: Mapping[int, LoaderPass]) -> bool:
    """Return True if a rank took a batch beyond another rank's last batch."""
    ended = [p.batches for p in passes.values() if p.exhausted]
    if not ended or max(p.batches for p in passes.values()) <= min(ended):
        return False
    location = str(next(iter(passes.values())).location)
    begun_again = {rank.rank for rank in facts.ranks for p in rank.passes if p.loader == key[0] and p.number > key[1]}
    for rank in facts.ranks:
        if passes[rank.rank].batches > min(ended):
            beyond = [
                b for b in backwards_of(rank) if (b.loader, b.batch[0]) == key and b.batch[1] > min(ended)
            ]  # excludes loaders iterated without a collective
            if any(loop.head == location for loop in facts.loops(facts.now(rank))) or (beyond and not begun_again):
                return True
    return False


def shard_in_words(loader_pass: LoaderPass) -> str:
    """Describe how many batches and samples a rank has taken."""
    size = len(loader_pass.indices) if loader_pass.exhausted and loader_pass.indices else -1
    words = f"{counted(loader_pass.batches, 'batch')}{'' if loader_pass.exhausted else ' so far'}"
    if loader_pass.expected >= 0 and not loader_pass.exhausted:
        words += f" of {loader_pass.expected}"
    if size >= 0:
        words += f", {counted(size, 'sample')}"
    elif loader_pass.size >= 0:
        words += f", of a dataset of {counted(loader_pass.size, 'sample')}"
    return f"{words}, {loader_pass.batch_size} to a batch" if loader_pass.batch_size > 1 else words


# Loop that a rank left early


def explain_by_loop(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP405: loop that a rank has left and others continue.

    Runs before extra calls of a rank, because the others would call the collectives after the loop, too.
    """
    if stayer.call is None or not _count_visits(leaver.of, stayer.call):
        return []
    loops = loops_left(facts, leaver, stayer)
    if not loops or not (_is_same_pass(leaver.of, stayer.of, loops[-1]) or not own_branches(facts, leaver, stayer)):
        return []
    places = [loop for loop, inner in itertools.pairwise(loops) if _may_be_left(facts, loop, inner, leaver, stayer)]
    return _loop_finding(facts, (places or loops[-1:])[0], leaver, stayer)


def _may_be_left(facts: EndingFacts, loop: Block, inner: Block, leaver: Position, stayer: Position) -> bool:
    """Return True if `leaver` may have exited a loop before `stayer`.

    Compares the number of runs of the inner loop; if unknown, a `for` over a range ends alike on all ranks.
    """
    runs = [len(runs_of(facts, inner, side.of.calls)) for side in (leaver, stayer)]
    if max(runs) > 1:
        return runs[0] < runs[1]
    return not loop.over.startswith("range(") or bool(exits_of(facts, loop, leaver, stayer))


def _is_same_pass(leaver: RankAtEnd, stayer: RankAtEnd, loop: Block) -> bool:
    """Return True if `stayer` is still in the last loader pass of `leaver`."""
    passes, leaver_passes = ([p for p in rank.passes if str(p.location) == loop.head][-1:] for rank in (stayer, leaver))
    pairs = zip(passes, leaver_passes, strict=False)
    return any(not p.exhausted and (p.loader, p.number) == (last.loader, last.number) for p, last in pairs)


def _count_visits(rank: RankAtEnd, call: Call) -> int:
    """Count visits to the lines of a call (unlogged forward: by its backward)."""
    forward = call.operation == DDP_FORWARD and all(logged.operation != DDP_FORWARD for logged in rank.calls)
    return sum(
        call.location in lines_in(logged.place)
        if forward
        else lines_of(logged) == lines_of(call) and logged.operation == call.operation
        for logged in rank.calls
    )


def _visits_in_words(rank: RankAtEnd, call: Call) -> str:
    """Describe how often a rank reached a call, with the counted unit."""
    times = _count_visits(rank, call)
    if call.operation not in (DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD):
        return f"{counted(times, 'call')} of {named(call)}"
    is_forward = call.operation != DDP_BACKWARD and any(logged.operation == call.operation for logged in rank.calls)
    return counted(times, f"{'forward' if is_forward else 'backward'} pass")


def _loop_finding(facts: EndingFacts, loop: Block, leaver: Position, stayer: Position) -> list[Finding]:
    assert stayer.call is not None
    most = _count_visits(stayer.of, stayer.call)
    leavers = [
        rank.rank
        for rank in facts.ranks
        if rank is leaver.of
        or (
            loop not in facts.loops(facts.now(rank))
            and _count_visits(rank, stayer.call) < most  # a rank that caught the error of its last call has left, too
        )
    ]
    others = [rank.rank for rank in facts.ranks if rank.rank not in leavers]
    times = _count_visits(leaver.of, stayer.call)
    passes = [p for p in leaver.of.passes if str(p.location) == loop.head]
    exits = exits_of(facts, loop, leaver, stayer)
    innermost = facts.loops(stayer.lines)[-1:] == [loop]  # each iteration makes the call once
    limit = loop.times if loop.times is not None and innermost and not leaver.of.earlier else 0.0
    by_exit = loop.times == ENDLESS or times < limit or any(not p.exhausted for p in passes[-1:])
    if not exits and times < limit:
        return _fewer(facts, loop, leavers, times, stayer)
    where = Location(loop.path, exits[0][0]) if len(exits) == 1 else None
    cause = f" by the `{exits[0][1]}` at {where}" if where is not None and by_exit else ""
    after = f" after {_visits_in_words(leaver.of, stayer.call)}" if not leaver.of.earlier else ""
    exit_lines = [f"the `{word}` at {loop.path}:{line} may end it" for line, word in exits] if not cause else []
    return one_finding(
        "DDP405",
        (named(stayer.call),),
        f"{format_ranks(leavers).capitalize()} left the loop at {loop.head}{cause}{after}{and_told(facts, leavers)}; "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)} it{and_told(facts, others)}.",
        ranks=leavers if len(leavers) <= len(others) else others,
        location=where or Location(loop.path, loop.line),
        evidence=[
            f"the loop {'runs while' if loop.word == 'while' else 'iterates over'} {loop.over}" if loop.over else "",
            *exit_lines,
            *calls_there(leaver, stayer),
        ],
        fix=FIX_OF_EXIT
        if exits and (by_exit or where)
        else "Let all ranks leave the loop in the same pass: all_reduce the values that its condition reads (a count, "
        "a metric, the remaining time), so that they are the same on every rank."
        if loop.word == "while"
        else _fix_of_loader(facts),
    )


FIX_OF_EXIT = (
    "Let all ranks leave the loop in the same pass: all_reduce the condition (the metric, a flag, the remaining time) "
    "before the test, so that all ranks decide the same. If the loop ends with the data of a rank, give every rank the "
    "same number of batches."
)


def _fewer(facts: EndingFacts, loop: Block, ranks: Sequence[int], times: int, stayer: Position) -> list[Finding]:
    """DDP508: skipped iterations of a loop that cannot end early."""
    assert loop.times is not None and stayer.call is not None
    blocks = [
        block
        for block in facts.around(stayer.lines, "branch", "rest", "try")
        if block.path == loop.path and loop.first < block.first and block.last <= loop.last
    ]
    where = Location(blocks[-1].path, blocks[-1].line) if len(blocks) == 1 else None
    return one_finding(
        "DDP508",
        ("backward",),
        f"{format_ranks(ranks).capitalize()} {plural_verb('calls', 'call', ranks)} {named(stayer.call)} in {times} of "
        f"the {loop.times:.0f} passes of the loop at {loop.head}, the others in more passes: {told(facts, ranks)}.",
        ranks=ranks,
        location=where or Location.parse(stayer.lines[0]),
        evidence=[*map(may_leave_out, blocks), *(f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks)],
    )


def may_leave_out(block: Block) -> str:
    """Describe a block that may skip an iteration."""
    return f"the `{block.word}` at {block.head} may leave it out"


# Extra collectives inside of Join


def explain_by_join(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: extra collectives under `Join`. Runs before loaders: `Join` allows uneven inputs."""
    joined = [rank for rank in facts.ranks if has_joined(rank)]
    calls_by_rank = {rank.rank: call for rank in facts.ranks if rank not in joined for call in _extra_calls(rank)[:1]}
    if not joined or not calls_by_rank:
        return []
    calling, missing = list(calls_by_rank), [rank.rank for rank in joined]
    call = calls_by_rank[calling[0]]
    return one_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('calls', 'call', calling)} {described_call(call)} inside "
        f"of `Join`, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not: without further batches, a "
        f"rank joins the collectives of DDP only; {told(facts, missing)}.",
        ranks=calling,
        location=Location.parse(call.location) if call.location else None,
        evidence=calls_there(position, peer),
        fix="Take the collective out of the `with Join(...)` block: add up on each rank, and reduce after it. Or give "
        "Join another Joinable, whose hook makes the same call.",
    )


def has_joined(rank: RankAtEnd) -> bool:
    """Return True if a rank ran out of batches and shadows collectives under `Join`."""
    return bool(rank.calls) and rank.calls[-1].place == JOINED


def _extra_calls(rank: RankAtEnd) -> list[Call]:
    """Return non-DDP calls since the first forward pass under the current `Join`."""
    calls = list(rank.calls)
    joined_at = max((index for index, call in enumerate(calls) if call.place == JOINED), default=-1)
    first = next((index for index, call in enumerate(calls) if index > joined_at and call.place == JOINING), len(calls))
    return [
        call for call in calls[first:] if call.place != JOINING and call.operation not in (DDP_BACKWARD, DDP_FORWARD)
    ]
