"""DDP405 uneven-iterations: error, uneven_steps, stops_run, keeps_gradients, keeps_results

Ranks run different numbers of synchronising iterations.

Why: Backward under DDP is a collective. A rank with one more batch waits for ranks that have left the loop. This rank
    hangs, or its collective is paired with a later one of the other ranks. (PyTorch docs,
    DistributedDataParallel.join and DistributedSampler, drop_last.)
Fix: Use DistributedSampler (it pads) or drop_last=True, or enter `with ddp.join():` around the loop.
Detected: ddpcheck compares which ranks have samples in a step, and how many batches the loader of each rank has. A
    difference is reported if ranks hang or fail because of it.
Ignore: Never. Inside `with ddp.join():` ranks do not hang, and nothing is reported.
Line: The `break` or `return` that leaves the loop, if it is the only one. Otherwise the loop, or the line that
    iterates over the data loader.
Checks: report parameters; run collectives; repro progress
Explains: DDP507
Reports: pytorch/pytorch#38174 pytorch/pytorch#33148 microsoft/PyMarlin#80
Example:
    files = all_files[rank::world_size]      # 5 files on rank 0, 4 on rank 1
    for file in files:                       # right: with ddp.join(): around the loop
        step(load(file))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.errors import EmptyShardError, RankFailure
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import ENDLESS, Block
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, new_finding, plural, plural_verb, pluralize_verb
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import fewer_backwards_finding
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, Backward
from ddpcheck.trace.positions import (
    EndingFacts,
    Position,
    backwards_of,
    count_visits,
    describe_loader_pass,
    describe_ranks,
    divergence_evidence,
    exits_of,
    has_joined,
    op_name,
)


def _activities_clause(facts: EndingFacts, ranks: Sequence[int]) -> str:
    activities = {rank.doing for rank in facts.ranks if rank.rank in ranks}
    if len(activities) > 1:
        return f" ({describe_ranks(facts, ranks)})"
    return f" and {pluralize_verb(activities.pop(), ranks)}"


def explain_by_loader(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP405: loader with fewer batches on a rank, which causes other mismatches; runs early."""
    if any(map(has_joined, facts.ranks)):
        return []
    by_rank = {rank.rank: {(p.loader, p.number): p for p in rank.passes} for rank in facts.ranks}
    for key in sorted(set.intersection(*(set(passes) for passes in by_rank.values())), key=lambda key: key[::-1]):
        passes = {rank: rank_passes[key] for rank, rank_passes in by_rank.items()}
        if len({p.location for p in passes.values()}) > 1 or not _has_rank_ahead(facts, key, passes):
            continue
        fewest = min(p.batches for p in passes.values() if p.exhausted)
        short_ranks = [rank for rank, p in passes.items() if p.exhausted and p.batches == fewest]
        longer_ranks = [rank for rank, p in passes.items() if p.batches > fewest]
        first = passes[short_ranks[0]]
        return new_finding(
            "DDP405",
            (first.dataset or "batches",),
            f"The loader has {plural(fewest, 'batch')} on {format_ranks(short_ranks)}, and "
            f"{format_ranks(longer_ranks)} {plural_verb('takes', 'take', longer_ranks)} batch {fewest + 1}: "
            f"{describe_ranks(facts, short_ranks)}, {describe_ranks(facts, longer_ranks)}.",
            ranks=short_ranks if len(short_ranks) <= len(longer_ranks) else longer_ranks,
            location=first.location,
            evidence=[
                *(f"rank {rank}: {describe_loader_pass(loader_pass)}" for rank, loader_pass in passes.items()),
                *facts.states,
            ],
            fix=_fix_of_loader(facts),
        )
    return []


def _fix_of_loader(facts: EndingFacts) -> str:
    """Return the fix for uneven batches, with `Join` unless `fully_shard` is used."""
    sharded = any(call.operation == SHARD_FORWARD for rank in facts.ranks for call in rank.calls)
    join = (
        " Or enter `with Join([model]):` around the loop, so that a rank that has left the loop still answers the "
        "reductions of the others."
    )
    return (
        "Give every rank the same number of batches: DistributedSampler pads the shards (drop_last=True cuts them); "
        f"for shards that are made by hand, cut each to the length of the shortest one.{'' if sharded else join}"
    )


def _has_rank_ahead(facts: EndingFacts, key: tuple[int, int], passes: Mapping[int, LoaderPass]) -> bool:
    """Return True if a rank trains beyond another rank's last batch (loader pass `key`)."""
    ended = [p.batches for p in passes.values() if p.exhausted]
    if not ended or max(p.batches for p in passes.values()) <= min(ended):
        return False
    location = str(next(iter(passes.values())).location)
    begun_again = {rank.rank for rank in facts.ranks for p in rank.passes if p.loader == key[0] and p.number > key[1]}
    for rank in facts.ranks:
        if passes[rank.rank].batches > min(ended):
            later_backwards = [
                b for b in backwards_of(rank) if (b.loader, b.batch[0]) == key and b.batch[1] > min(ended)
            ]  # excludes loaders iterated without a collective
            if any(loop.head == location for loop in facts.loops(facts.current_stack(rank))) or (
                later_backwards and not begun_again
            ):
                return True
    return False


def _describe_visits(rank: RankAtEnd, call: Call) -> str:
    """Describe how often a rank made a call: "3 backward passes"."""
    times = count_visits(rank, call)
    if call.operation not in (DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD):
        return f"{plural(times, 'call')} of {op_name(call)}"
    is_forward = call.operation != DDP_BACKWARD and any(logged.operation == call.operation for logged in rank.calls)
    return plural(times, f"{'forward' if is_forward else 'backward'} pass")


def uneven_loop_finding(facts: EndingFacts, loop: Block, leaver: Position, stayer: Position) -> list[Finding]:
    assert stayer.call is not None
    most = count_visits(stayer.state, stayer.call)
    leavers = [
        rank.rank
        for rank in facts.ranks
        if rank is leaver.state
        or (
            loop not in facts.loops(facts.current_stack(rank))
            and count_visits(rank, stayer.call) < most  # a rank that caught the error of its last call has left, too
        )
    ]
    others = [rank.rank for rank in facts.ranks if rank.rank not in leavers]
    times = count_visits(leaver.state, stayer.call)
    passes = [p for p in leaver.state.passes if str(p.location) == loop.head]
    exits = exits_of(facts, loop, leaver, stayer)
    innermost = facts.loops(stayer.lines)[-1:] == [loop]  # each iteration makes the call once
    limit = loop.times if loop.times is not None and innermost and not leaver.state.earlier else 0.0
    by_exit = loop.times == ENDLESS or times < limit or any(not p.exhausted for p in passes[-1:])
    if not exits and times < limit:
        return fewer_backwards_finding(facts, loop, leavers, times, stayer)
    where = Location(loop.path, exits[0][0]) if len(exits) == 1 else None
    cause = f" by the `{exits[0][1]}` at {where}" if where is not None and by_exit else ""
    visits = f" after {_describe_visits(leaver.state, stayer.call)}" if not leaver.state.earlier else ""
    exit_lines = [f"the `{word}` at {loop.path}:{line} may end it" for line, word in exits] if not cause else []
    return new_finding(
        "DDP405",
        (op_name(stayer.call),),
        f"{format_ranks(leavers).capitalize()} left the loop at {loop.head}{cause}{visits}"
        f"{_activities_clause(facts, leavers)}; "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)} it{_activities_clause(facts, others)}.",
        ranks=leavers if len(leavers) <= len(others) else others,
        location=where or Location(loop.path, loop.line),
        evidence=[
            f"the loop {'runs while' if loop.word == 'while' else 'iterates over'} {loop.over}" if loop.over else "",
            *exit_lines,
            *divergence_evidence(leaver, stayer),
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


def judge_empty_shards(failures: Sequence[RankFailure], world_size: int) -> list[Finding]:
    """DDP405: ranks that failed because of an empty shard in a step."""
    empty = {f.rank: (f.exception, f.location) for f in failures if isinstance(f.exception, EmptyShardError)}
    if not empty or len(empty) == world_size:
        return []
    step = min(exception.step for exception, _ in empty.values())
    ranks = sorted(empty)
    return new_finding(
        "DDP405",
        (f"step {step}",),
        f"{format_ranks(ranks).capitalize()} {plural_verb('has', 'have', ranks)} no samples in step {step}, and "
        f"the others have: a training loop ends there on {plural_verb('this rank', 'these ranks', ranks)}, and the "
        f"others wait in backward for {plural_verb('its', 'their', ranks)} gradients.",
        ranks=ranks,
        steps=(step,),
        location=Location.parse(empty[ranks[0]][1]),
        evidence=[f"rank {rank}: {empty[rank][0]}" for rank in ranks],
    )


def left_loader_loop_finding(
    facts: EndingFacts, ranks_ahead: Sequence[int], by_rank: Mapping[int, Backward], backward_behind: Backward
) -> list[Finding]:
    """DDP405: ranks that left a loop over a data loader before the last batch."""
    key = (backward_behind.loader, backward_behind.batch[0])
    dropped = {rank.rank: p for rank in facts.ranks for p in rank.passes if (p.loader, p.number) == key}
    dropped = {rank: dropped[rank] for rank in ranks_ahead if rank in dropped and by_rank[rank].batch[0] > key[1]}
    if backward_behind.loader < 0 or not dropped or any(p.exhausted for p in dropped.values()):
        return []
    others = [rank for rank in by_rank if rank not in dropped]
    first = next(iter(dropped.values()))
    blocks = facts.blocks.get(str(first.location), ())
    loops = [loop for loop in blocks if loop.head == str(first.location)]
    exits = [*(loops[0].exits if loops else ()), *((block.line, block.word) for block in blocks if block.kind == "try")]
    where = Location(loops[0].path, exits[0][0]) if loops and len(exits) == 1 else None
    cause = f" by the `{exits[0][1]}` at {where}" if where is not None else ""
    return new_finding(
        "DDP405",
        (first.dataset or "batches",),
        f"{format_ranks(dropped).capitalize()} left the loop at {first.location}{cause} in batch {first.batches}, and "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)} it: "
        f"{describe_ranks(facts, list(dropped))}, {describe_ranks(facts, others)}.",
        ranks=list(dropped),
        location=where or first.location,
        evidence=[
            *(f"the `{word}` at {loops[0].path}:{line} may end it" for line, word in exits if loops and not cause),
            *(f"rank {rank}: then {b.call.place}" for rank, b in by_rank.items()),
            *facts.states,
        ],
        fix=FIX_OF_EXIT,
    )
