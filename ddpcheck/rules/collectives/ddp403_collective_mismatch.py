"""DDP403 collective-mismatch: error, ends_run, stops_run, keeps_gradients, keeps_results

Ranks enter different collectives, or the same one with different shapes or dtypes, at the same point.

Why: Collectives of a group are matched by order, not by name. With nccl, a wrong pair hangs. With gloo, it aborts the
    process or closes the connection. A wrong pair may also silently mix up numbers. (PyTorch docs, torch.distributed:
    collectives must be called in the same order on all ranks.)
Fix: Call the same collectives in the same order with the same shapes and dtypes on every rank.
Detected: Each rank logs every collective before the call, with its operation, shape, dtype and line. ddpcheck aligns
    the logs of each process group by sequence number. It reports the first collective that differs. `ddpcheck hang`
    does the same with Flight Recorder dumps.
Ignore: Never, if the operations differ. A difference in lines alone is reported only if a rank hangs because of it.
Line: The branch that only some ranks take, or the collective that only some ranks call. If the logs tell only that
    operations differ, the call of a rank in the minority. For wrappers in a different order, the constructor on a rank
    that differs.
Checks: report parameters; run collectives; repro progress
Reports: alan-turing-institute/autocast#386
Example:
    if dist.get_rank() == 0:
        dist.all_reduce(metric)              # the others are in backward already; right: on every rank
    loss.backward()
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.evidence.endings import RankAtEnd, ScheduledCall
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import (
    format_ranks,
    group_by,
    group_by_value,
    join_names,
    minority_ranks,
    new_finding,
    plural_verb,
    ranks_or_all,
)
from ddpcheck.rules.collectives.ddp402_hang import missing_peer_finding
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, JOINED, JOINING, SHARD_FORWARD
from ddpcheck.trace.collectives import DIVERGES_AT, blocked_calls, call_signature, first_unequal_call, thread_kind
from ddpcheck.trace.positions import (
    GROUP_ORDER,
    EndingFacts,
    Position,
    call_sequence,
    describe_call,
    describe_ranks,
    divergence_evidence,
    has_joined,
    lines_of,
    local_branches,
    op_name,
)
from ddpcheck.trace.wait_graph import WaitGraph, find_circle


def describe_block(branch: Block) -> str:
    """Describe where the code of a block is: "in the branch at train.py:12"."""
    where = {"branch": "in the branch", "try": f"in the block that the `{branch.word}` cuts short"}
    return f"{where.get(branch.kind, f'past the `{branch.word}`')} at {branch.head}"


def explain_by_local_condition(facts: EndingFacts, stayer: Position, leaver: Position, block: Block) -> list[Finding]:
    call = stayer.call
    assert call is not None
    number = next(index for index, other_call in enumerate(stayer.state.calls) if other_call is call)
    matching = [rank.rank for rank in facts.ranks if _makes_call(rank.calls, number, call)]
    calling = sorted({*matching, stayer.state.rank} - {leaver.state.rank})
    missing = [rank.rank for rank in facts.ranks if rank.rank not in calling]
    arms = {branch.head for branch in facts.enclosing(leaver.lines, "branch") if not leaver.state.ended}
    is_arm = block.kind == "branch"
    other_branch = ", in the other branch of it" if block.head in arms else ""
    reason = f"each rank decides separately at {block.head}"
    fix = (
        f"Make the same decision on all ranks at {block.head}: all_reduce its input (the metric, the loss, a flag) "
        "before the test, or broadcast the decision of rank 0. "
        + (
            f"Or take {op_name(call)} out of the branch."
            if is_arm and call.operation != DDP_BACKWARD
            else f"Or reach {op_name(call)} on every rank."
        )
    )
    if block.kind == "try":
        reason = f"the `{block.word}` at {block.head} may have caught an exception that is not known, and skipped it"
        fix = (
            f"Have the `{block.word}` at {block.head} print the traceback and raise the exception again: torchrun then "
            f"ends all ranks. Or catch it at the raising line, so that this rank reaches {op_name(call)} nevertheless."
        )
    return new_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('reaches', 'reach', calling)} {describe_call(call)}, "
        f"{describe_block(block)}, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not in the same "
        f"pass{other_branch}: {describe_ranks(facts, missing)}.",
        ranks=missing if len(missing) < len(calling) + (not is_arm) else calling,  # on a tie, the rank that jumped
        location=Location(block.path, block.line),
        evidence=[
            f"all of them have reached it before: {reason}",
            f"called from {', '.join(stayer.lines[1:4])}" if len(stayer.lines) > 1 else "",
            *divergence_evidence(stayer, leaver),
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


def judge_collectives(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """DDP403: first mismatched collective of each process group."""
    findings = []
    distinct = {id(log): log for log in logs}  # most simulated ranks share one log
    groups = {call.group: call.members for log in distinct.values() for call in log}
    for group, members in sorted(groups.items()):
        ranks = [rank for rank in members if rank < len(logs)]
        kinds = list(dict.fromkeys(id(logs[rank]) for rank in ranks))
        mismatch = first_unequal_call([[call for call in distinct[kind] if call.group == group] for kind in kinds])
        if mismatch is None:
            continue
        call_number, by_kind = mismatch[0] + (first or {}).get(group, 0), dict(zip(kinds, mismatch[1], strict=True))
        row = [by_kind[id(logs[rank])] for rank in ranks]
        calls = [call for call in row if call is not None]
        absent = [rank for rank, call in zip(ranks, row, strict=True) if call is None]
        if absent and len(set(map(call_signature, calls))) == 1 and set(absent) <= set(at_work):
            continue
        present = [rank for rank in ranks if rank not in absent]
        if len(set(map(call_signature, calls))) == 1:
            differing, minority = calls[0], tuple(absent)
            message = f"{format_ranks(present).capitalize()} called {calls[0]}, and {format_ranks(absent)} never did."
        else:
            minority = tuple(present[index] for index in minority_ranks([call_signature(call) for call in calls]))
            differing = calls[present.index(minority[0])]
            message = f"Collective number {call_number} differs between the ranks."
        words = [f"{call or 'none'}{f', in {call.place}' if call is not None and call.place else ''}" for call in row]
        findings += new_finding(
            "DDP403",
            sorted({call.operation for call in calls}),
            message,
            ranks=minority,
            location=Location.parse(differing.location or next((call.location for call in calls if call.location), "")),
            evidence=[
                f"{format_ranks(rank for rank, _ in pairs)}, collective number {call_number}: {text}"
                for text, pairs in group_by(zip(ranks, words, strict=True), lambda pair: pair[1]).items()
            ],
            tags=(f"{DIVERGES_AT}{call_number}",),
        )
    return findings


def mismatch_finding(
    number: int, calls: Mapping[int, Call], calling: Sequence[int], missing: Sequence[int], last_calls: Sequence[str]
) -> list[Finding]:
    extra, other_call = calls[calling[0]], calls[missing[0]]
    minority = missing if len(missing) < len(calling) else calling
    return new_finding(
        "DDP403",
        (extra.operation,),
        f"Collective number {number} pairs up different lines: {format_ranks(calling)} "
        f"{plural_verb('calls', 'call', calling)} {extra}, {format_ranks(missing)} {other_call}; from there on "
        f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} ahead of {format_ranks(calling)}.",
        ranks=minority,
        location=Location.parse(extra.location),
        evidence=[*(f"rank {rank}, collective number {number}: {call}" for rank, call in calls.items()), *last_calls],
        fix=f"Call {extra.operation} at {extra.location} on every rank, equally often, or on none.",
        tags=(f"{DIVERGES_AT}{number}",),
    )


def explain_by_join(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: collective under `Join` that ranks do not call after their last batch."""
    joined = [rank for rank in facts.ranks if has_joined(rank)]
    calls_by_rank = {rank.rank: call for rank in facts.ranks if rank not in joined for call in _join_calls(rank)[:1]}
    if not joined or not calls_by_rank:
        return []
    calling, missing = list(calls_by_rank), [rank.rank for rank in joined]
    call = calls_by_rank[calling[0]]
    return new_finding(
        "DDP403",
        (call.operation,),
        f"{format_ranks(calling).capitalize()} {plural_verb('calls', 'call', calling)} {describe_call(call)} inside "
        f"of `Join`, and {format_ranks(missing)} {plural_verb('does', 'do', missing)} not: without further batches, a "
        f"rank joins the collectives of DDP only; {describe_ranks(facts, missing)}.",
        ranks=calling,
        location=Location.parse(call.location) if call.location else None,
        evidence=divergence_evidence(position, peer),
        fix="Take the collective out of the `with Join(...)` block: add up on each rank, and reduce after it. Or give "
        "Join another Joinable, whose hook makes the same call.",
    )


def _join_calls(rank: RankAtEnd) -> list[Call]:
    """Return collectives that the script, not DDP, called since the first forward under `Join`."""
    calls = list(rank.calls)
    joined_at = max((index for index, call in enumerate(calls) if call.place == JOINED), default=-1)
    first = next((index for index, call in enumerate(calls) if index > joined_at and call.place == JOINING), len(calls))
    return [c for c in calls[first:] if c.place != JOINING and c.operation not in (DDP_BACKWARD, DDP_FORWARD)]


def explain_by_circle_of_groups(graph: WaitGraph) -> list[Finding]:
    """DDP403: circular wait of ranks across process groups."""
    circle = graph.circle()
    return graph.circle_finding("DDP403", circle, GROUP_ORDER) if circle else []


def judge_schedule_waits(schedules: Sequence[Sequence[ScheduledCall]]) -> list[Finding]:
    """DDP403: circular wait across process groups, each of which has matching calls."""
    stuck = dict(blocked_calls(schedules))
    if not stuck:
        return []
    circle = find_circle(stuck)
    words = {rank: f"{call} of {format_ranks(call.members)}" for rank, (call, _) in stuck.items()}
    texts = [f"{format_ranks([rank])} in {words[rank]} for {format_ranks([peer])}" for rank, peer in circle]
    waits = group_by(stuck, lambda rank: (words[rank], format_ranks(stuck[rank][1])))
    first = stuck[circle[0][0]][0]
    return new_finding(
        "DDP403",
        sorted({stuck[rank][0].operation for rank, _ in circle}),
        f"Ranks wait for each other in different process groups: {join_names(texts, most=4)}.",
        ranks=tuple(sorted(rank for rank, _ in circle)),
        location=Location.parse(first.location),
        evidence=[
            f"{format_ranks(ranks)} {plural_verb('waits', 'wait', ranks)} in {call} for {missing}"
            for (call, missing), ranks in waits.items()
        ],
        fix=GROUP_ORDER,
    )


def explain_by_construction(facts: EndingFacts) -> list[Finding]:
    """DDP403: DDP constructor that waits for a rank whose script has ended."""
    finished = [rank.rank for rank in facts.ranks if rank.ended and not rank.constructs]
    constructing = [rank for rank in facts.ranks if rank.constructs and rank.waits and rank.lines]
    if not finished or not constructing:
        return []
    others, have = [rank.rank for rank in constructing], plural_verb("has", "have", finished)
    return new_finding(
        "DDP403",
        ("DistributedDataParallel",),
        f"{format_ranks(others).capitalize()} {plural_verb('constructs', 'construct', others)} DistributedDataParallel "
        f"at {constructing[0].lines[0]}, which waits for all ranks, and {format_ranks(finished)} {have} "
        "run to the end of the script without it.",
        ranks=finished,
        location=Location.parse(constructing[0].lines[0]),
        evidence=facts.states,
        fix="Construct the wrapper on every rank of its process group, or leave the script on all of them before that.",
    )


def unmatched_call_finding(
    facts: EndingFacts, side: Position, peer: Position, where: str, branch: Block | None
) -> list[Finding]:
    calling = [
        rank.rank
        for rank in facts.ranks
        if any(where in lines_of(call) for call in rank.calls) or where in facts.current_stack(rank)
    ]
    missing = [rank.rank for rank in facts.ranks if rank.rank not in calling]
    if side.call is None and (wait := side.state.waits_for) is not None:
        by_rank = {rank.rank: rank for rank in facts.ranks}
        return missing_peer_finding(by_rank, [side.state.rank, *({wait.peer} & by_rank.keys())], [wait], "")
    waits_in = side.state.doing.partition(" at ")[0].removeprefix("waits in ")
    name = op_name(side.call) if side.call is not None else waits_in
    test = f", {describe_block(branch)}" if branch is not None else ""
    peer_group, fix, edit_line = "", _fix_of_call(side.call, name, where, branch), where
    if side.call is not None and peer.call is not None and side.call.group != peer.call.group:
        edit_line = next((line for line in side.lines if branch in facts.blocks.get(line, ())), where)
        test = f", in {side.call.group_words or 'another process group'}{test}"
        peer_group = f", in {peer.call.group_words}" if peer.call.group_words else ""
        fix = f"Have every rank call the collectives of both process groups in the same order. {fix}"
    is_missing = branch is None and peer.call is None  # then the call is not extra
    verb = plural_verb("reaches", "reach", calling)
    return new_finding(
        "DDP403",
        (side.call.operation if side.call is not None else name.partition("(")[0].rpartition(" ")[2],),
        f"{format_ranks(calling).capitalize()} {verb} {name} at {where}{test}, and {format_ranks(missing)} "
        f"{plural_verb('does', 'do', missing)} not: {describe_ranks(facts, missing)}{peer_group}.",
        ranks=missing if len(missing) < len(calling) or is_missing else calling,
        location=Location.parse(edit_line),
        evidence=[
            f"called from {', from '.join(side.lines[1:4])}" if len(side.lines) > 1 else "",
            *(f"which is {describe_block(block)}" for block in local_branches(facts, side, peer)[1:]),
            *divergence_evidence(side, peer),
        ],
        fix=fix,
    )


def _fix_of_call(call: Call | None, name: str, where: str, branch: Block | None) -> str:
    out = f" (take it out of the branch at {branch.head})" if branch is not None and branch.kind == "branch" else ""
    if call is None:
        return f"Let the other rank reach the partner of {name} at {where}, or remove it."
    if call.operation == DDP_FORWARD:
        return (
            "DDP broadcasts buffers in forward, in eval mode too, and every rank has to take part. To evaluate on one "
            f"rank, call the inner module at {where}: model.module(x) instead of model(x). Or run it on every "
            f"rank{out}, with the same number of batches."
        )
    if call.operation == SHARD_FORWARD:
        return (
            "fully_shard gathers parameters in each forward pass, in eval mode and under no_grad too, and every rank "
            f"has to take part: run it at {where} on every rank{out}, with the same number of batches."
        )
    if call.operation == DDP_BACKWARD:
        return f"Make the backward pass at {where} on every rank{out}, or compute it without the wrapper, in no_sync."
    if call.operation == "new_group":
        return (
            f"Call new_group at {where} on every rank of the job, including those that are not in the group{out}; with "
            "use_local_synchronization=True only its members call it."
        )
    return f"Call {call.operation} at {where} on every rank{out}, equally often and in the same order, or on none."


def different_calls_finding(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: calls in a different order, or in different branches of one `if`."""
    if position.call is None or peer.call is None:
        return []
    first, second = (position, peer) if position.state.rank < peer.state.rank else (peer, position)
    assert first.call is not None and second.call is not None
    ranks = [r.rank for r in facts.ranks if call_sequence(r) == call_sequence(second.state)]
    heads = {block.head for block in facts.enclosing(first.lines, "branch")} & {
        block.head
        for block in facts.enclosing(second.lines, "branch")
        if block not in facts.enclosing(first.lines, "branch")
    }
    group, other_group = (f" in {call.group_words}" if call.group_words else "" for call in (first.call, second.call))
    if differs := first.call.group != second.call.group:
        other_group = other_group or ", in another process group"
    return new_finding(
        "DDP403",
        sorted({first.call.operation, second.call.operation}),
        f"{format_ranks([first.state.rank]).capitalize()} reaches {first.call}{group if differs else ''}, and "
        f"{format_ranks(ranks)} {plural_verb('reaches', 'reach', ranks)} {second.call}{other_group if differs else ''}"
        + (f", in the other branch of the `if` at {min(heads)}" if heads else "")
        + ".",
        ranks=ranks if len(ranks) * 2 <= len(facts.ranks) else [r.rank for r in facts.ranks if r.rank not in ranks],
        location=Location.parse(min(heads) if heads else second.call.location),
        evidence=divergence_evidence(first, second),
        fix=GROUP_ORDER if differs else "",
    )


def judge_interleaving(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP403: collectives of several threads in one process group, ordered differently on each rank.

    Each thread makes the same calls on all ranks, but the ranks begin the calls of two threads in different orders. If
    the logged order is equal, two threads of a rank must be waiting: parts of object collectives may have interleaved.
    """
    for group in sorted({call.group for rank in ranks for call in rank.calls if call.thread}):
        by_rank = {rank.rank: [call for call in rank.calls if call.group == group] for rank in ranks}
        logs = list(filter(None, by_rank.values()))
        for kind in {thread_kind(call) for log in logs for call in log}:
            sequences = [[_call_key(call) for call in log if thread_kind(call) == kind] for log in logs]
            if any(sequence != max(sequences, key=len)[: len(sequence)] for sequence in sequences):
                break  # calls of this thread differ between ranks
        else:
            last = next((tuple(by_rank[rank.rank]) for rank in ranks if rank.in_threads), ())
            index, mismatch = first_unequal_call(logs) or (0, last)
            calls = [call for call in mismatch if call is not None]
            # last call of each kind of thread, then the last two calls
            pair = [
                call for after, call in enumerate(calls, 1) if thread_kind(call) not in map(thread_kind, calls[after:])
            ][-2:]
            if len(pair) == 2 and all(set(map(_call_key, log[index:])) >= set(map(_call_key, pair)) for log in logs):
                return interleaving_finding(ranks, *sorted(pair, key=lambda call: call.thread))
    return []


def _call_key(call: Call) -> tuple[str, str, str]:
    return thread_kind(call), call.operation, call.payload


def interleaving_finding(ranks: Sequence[RankAtEnd], call: Call, rival: Call) -> list[Finding]:
    return new_finding(
        "DDP403",
        sorted({call.operation, rival.operation}),
        f"A thread ({thread_kind(rival)}) calls {describe_call(rival)} in {rival.group_words or 'a process group'} "
        f"in which {f'a thread ({thread_kind(call)})' if call.thread else 'the main thread'} "
        f"calls {describe_call(call)}: nothing orders the two, and the order differs between ranks.",
        location=Location.parse(rival.location),
        evidence=[f"rank {rank.rank}: {rank.doing}" for rank in ranks],
        fix=f"Give the code that calls {describe_call(rival)} its own process group, created on every rank by "
        "new_group() before: async_save takes it as process_group. Or wait for the thread before the next collective "
        "of this group.",
    )


def judge_wrapper_order(ranks: Sequence[Sequence[WrapperBegun]]) -> list[Finding]:
    """DDP403: wrappers constructed in a different order, so that DDP pairs different modules."""
    if not all(ranks):
        return []  # a rank without wrappers waits elsewhere, or has failed
    lines = [[str(wrapper.location) for wrapper in rank_wrappers] for rank_wrappers in ranks]
    permuted = len({tuple(sorted(rank_lines)) for rank_lines in lines}) == 1
    for number, wrappers in enumerate(zip(*ranks, strict=False)):
        first = wrappers[0]
        differing_ranks = [rank for rank, wrapper in enumerate(wrappers) if _wraps_unrelated(wrapper, first)]
        if not differing_ranks and permuted:
            differing_ranks = [rank for rank, wrapper in enumerate(wrappers) if wrapper.location != first.location]
        if differing_ranks:
            if len({wrapper.location.path if wrapper.location else "" for wrapper in wrappers}) == 1:
                # Ranks at a later line have skipped the line at which the other ranks wait.
                line = min(wrapper.location.line for wrapper in wrappers if wrapper.location is not None)
                differing_ranks = [rank for rank, w in enumerate(wrappers) if w.location and w.location.line == line]
            descriptions = [f"{wrapper.module} at {wrapper.location}" for wrapper in wrappers]
            return new_finding(
                "DDP403",
                ("DistributedDataParallel",),
                f"Wrapper number {number + 1} differs between ranks: {'; '.join(group_by_value(descriptions))}. The "
                "constructors of DDP wait for each other, and pair up in the order in which each rank calls them.",
                ranks=ranks_or_all(differing_ranks, len(wrappers)),
                location=wrappers[differing_ranks[0]].location,
                evidence=group_by_value([" and ".join(f"{w.module} at {w.location}" for w in r) for r in ranks]),
                fix="Construct the same wrappers, in the same order, on every rank.",
            )
    return []


def _wraps_unrelated(wrapper: WrapperBegun, first: WrapperBegun) -> bool:
    """Return True if wrappers hold different modules without a common parameter (name and shape)."""
    if wrapper.module == first.module or wrapper.description == first.description:
        return False
    params, first_params = ({(p.name, p.shape) for p in each.description.parameters} for each in (wrapper, first))
    return params.isdisjoint(first_params)
