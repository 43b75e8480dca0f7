"""Explanations of ranks that failed or hung, in order: the first that applies wins."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import DEFAULT_GROUP, RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block, blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by, ranks_or_all
from ddpcheck.rules.collectives import ddp401_rank_raised as ddp401
from ddpcheck.rules.collectives import ddp402_hang as ddp402
from ddpcheck.rules.collectives import ddp403_collective_mismatch as ddp403
from ddpcheck.rules.collectives import ddp404_rank_died as ddp404
from ddpcheck.rules.collectives import ddp405_uneven_iterations as ddp405
from ddpcheck.rules.collectives import ddp406_marked_ready_twice as ddp406
from ddpcheck.rules.collectives.divergent_branch import explain_by_branch, split_line
from ddpcheck.rules.collectives.early_exit import explain_by_loop, explain_by_skipped_end, explain_by_skipped_pass
from ddpcheck.rules.collectives.first_divergence import extra_call_index, judge_divergences
from ddpcheck.rules.gradients import ddp311_saved_tensor_overwritten as ddp311
from ddpcheck.rules.gradients import ddp501_forward_bypassed as ddp501
from ddpcheck.rules.gradients import ddp509_backward_without_forward_pairing as ddp509
from ddpcheck.rules.gradients import ddp521_shard_as_whole as ddp521
from ddpcheck.rules.parameters import ddp101_unused_parameter as ddp101
from ddpcheck.rules.parameters import ddp513_static_graph_violated as ddp513
from ddpcheck.rules.replicas import ddp503_changed_after_wrapping as ddp503
from ddpcheck.stream.entries import DDP_FORWARD, backward_of
from ddpcheck.trace.check_context import first_explanation
from ddpcheck.trace.collectives import first_unequal_call
from ddpcheck.trace.failures import (
    GRAPH_CHANGED,
    MARKED_TWICE,
    MODIFIED_IN_PLACE,
    NOT_FINISHED,
    TIMEOUT_PATTERN,
    UNDEFINED_GRADIENT,
    FailureFacts,
    follows_from_another_rank,
    is_of_backend,
)
from ddpcheck.trace.positions import EndingFacts, Position, call_sequence, lines_of, local_branches
from ddpcheck.trace.wait_graph import GroupLogs, RanksSeen, WaitGraph


def diagnose(facts: FailureFacts) -> list[Finding]:
    """Return root causes of failed, hung or mismatched ranks, unless `facts.known` has a cause."""
    findings = ddp401.explain_by_rendezvous(facts) or ddp401.explain_by_awaited_thread(facts)
    if findings or is_explained(facts):
        return findings
    if not facts.failures:
        return explain_by_silent_mismatch(facts)
    if facts.find_positions is not None and (findings := explain_by_torch_error(facts)):
        seen = {(finding.code, key) for finding in facts.known for key in (finding.location, finding.subjects)}
        findings = [f for f in findings if seen.isdisjoint({(f.code, f.location), (f.code, f.subjects)})]
    else:
        mismatch = explain_by_mismatch(facts)
        findings = explain_by_positions(facts, mismatch) or mismatch or first_explanation(LAST_EXPLANATIONS, facts)
    if by_thread := [cause for finding in findings for cause in ddp401.explain_by_ended_thread(facts, finding)]:
        return by_thread
    evidence = [*ddp401.describe_threads(facts), *facts.thread_calls]
    return [replace(finding, evidence=(*finding.evidence, *evidence)) for finding in findings]


LAST_EXPLANATIONS = (ddp402.explain_by_hang, ddp401.explain_by_first_exception, ddp404.explain_by_death)
"""Explanations in order, if the logged calls match and no line explains the failures."""


def is_explained(facts: FailureFacts) -> bool:
    """Return True if findings in `facts.known` may have caused all failures."""
    if any("mp_policy" in finding.subjects for finding in facts.known) and all(map(_fits_gloo_error, facts.failures)):
        return True
    return bool(facts.known) and all(
        follows_from_another_rank(failure) or failure.rank in facts.constructing for failure in facts.failures
    )


def _fits_gloo_error(failure: RankFailure) -> bool:
    """Return True if tensors of unequal sizes under gloo may have caused a failure."""
    return follows_from_another_rank(failure) or failure.exit_code == -signal.SIGABRT or "gloo" in failure.message


def explain_by_mismatch(facts: FailureFacts) -> list[Finding]:
    """Report collectives or call sites that do not match between ranks.

    Runs first, since ranks with mismatched collectives hang or fail with a communication error. Any other exception is
    a separate cause: the rank that raised never reached the next collective.
    """
    at_work = {failure.rank for failure in facts.stuck if not failure.collective}
    mismatch = judge_divergences(facts.logs, at_work)
    if not mismatch or (facts.ended and not is_of_backend(facts.ended[0])):
        return []
    return [replace(mismatch[0], evidence=(*mismatch[0].evidence, *facts.evidence))]


def explain_by_positions(facts: FailureFacts, mismatch: Sequence[Finding]) -> list[Finding]:
    """Explain a mismatch, hang or lost connection by the lines that ranks have reached."""
    ended = facts.ended[:1]
    has_own_cause = ended and (ended[0].kind != "raised" or not follows_from_another_rank(facts.first))
    if facts.find_positions is None or (not mismatch and (has_own_cause or facts.interrupted)):
        return []
    messages = [finding.message for finding in mismatch[:1]]
    tags = mismatch[0].tags if mismatch else ddp401.tags_of_exception(ended[0]) if ended else ()
    findings = judge_positions(facts.find_positions())
    return [replace(finding, evidence=(*finding.evidence, *messages), tags=tags) for finding in findings]


def explain_by_silent_mismatch(facts: FailureFacts) -> list[Finding]:
    """Report mismatched collectives if no rank is known to have failed.

    Either the script finished anyway, or the processes were killed without an exception (gloo aborts on mismatched
    tensor sizes), so that only their logged calls are known.
    """
    unfinished = sorted({*range(len(facts.logs))}.difference(facts.finished))
    mismatch = ddp403.judge_collectives(facts.logs, unfinished) if bool(unfinished) == bool(facts.exit_code) else []
    how = "no rank failed, although calls do not match: they have the same size, do not wait, or their error was caught"
    if unfinished:
        how = f"{format_ranks(unfinished)} ended without a Python exception"
    findings = explain_by_positions(facts, mismatch) if mismatch else []
    return [replace(finding, evidence=(*finding.evidence, how)) for finding in findings or mismatch]


def explain_by_torch_error(facts: FailureFacts) -> list[Finding]:
    """Return at most one finding, if the first failure is a known torch error."""
    if not facts.failures or facts.first.kind != "raised":
        return []
    return next((explain(facts) for pattern, explain in TORCH_ERRORS.items() if re.search(pattern, facts.text)), [])


def explain_shards(facts: FailureFacts) -> list[Finding]:
    """Explain an operation that mixes shards (DTensor) and plain tensors."""
    if "load_state_dict" in facts.text or "aten.copy_." in facts.text:
        return ddp521.explain_full_state_into_shards(facts, "copied into")
    if facts.text.rpartition('File "')[2].startswith("torch/optim/"):
        return ddp521.explain_mixed_state(facts)
    if "torch/nn/utils/clip_grad.py" in facts.text or "get_total_norm" in facts.text:
        return ddp521.explain_mixed_norms(facts)
    for begun in facts.begun[-1:]:
        if str(begun.location) == facts.first.location:  # e.g. DDP leaves the second name of a tied parameter as is
            has_mesh = begun.options.get("device_mesh", "None") != "None"
            return [] if has_mesh else ddp401.explain_dtensor_parameters(facts)
    return ddp501.explain_shard_outside_forward(facts)


def explain_missing_shard(facts: FailureFacts) -> list[Finding]:
    """Explain a shard that `load_state_dict` or the script replaced by a plain tensor."""
    if "_fully_shard" not in facts.text:
        return []
    if "load_state_dict" in facts.text:
        return ddp521.explain_full_state_into_shards(facts, "assigned instead of")
    where = next((change.location for change in facts.replaced), None)
    names = [name for change in facts.replaced if change.location == where for name in change.names]
    raised = Location.parse(facts.first.location)
    ranks, evidence = ranks_or_all(facts.ranks, len(facts.logs)), (facts.first.message,)
    findings = ddp503.replaced_after_sharding(names or ["parameters"], raised, later=False)
    return [replace(finding, ranks=ranks, evidence=evidence).relocated(where, "raised") for finding in findings]


DTYPE_PATTERN = r"(?s)(?=.*(BFloat16|Half)).*(must have the same dtype|expected scalar type|should be the same)"
TORCH_ERRORS = {
    MARKED_TWICE: ddp406.explain_marked_twice,
    UNDEFINED_GRADIENT: ddp509.explain_undefined_gradient,
    MODIFIED_IN_PLACE: ddp311.explain_overwritten,
    GRAPH_CHANGED: ddp513.explain_graph_changed,
    f"{NOT_FINISHED} in the prior iteration": ddp101.explain_unfinished_reduction,
    "got mixed torch.Tensor and DTensor": explain_shards,
    "object has no attribute '_local_tensor'": explain_missing_shard,
    DTYPE_PATTERN: ddp401.explain_dtype,
    TIMEOUT_PATTERN: ddp402.explain_timeout,
}
"""Explanation by regex of torch's error message; torch has no error codes."""


def judge_positions(facts: EndingFacts) -> list[Finding]:
    """Return at most one finding: the divergence after which ranks wait for each other."""
    if findings := ddp402.judge_circle(facts.ranks) or ddp403.judge_interleaving(facts.ranks):
        return findings
    positions = find_divergence(facts)
    if positions is None:
        return (
            ddp404.explain_by_unlogged_exit(facts)
            or ddp402.judge_missing_peer(facts.ranks)
            or ddp403.explain_by_construction(facts)
        )
    sides = positions, positions[::-1]
    return next((findings for explain in EXPLANATIONS for pair in sides if (findings := explain(facts, *pair))), [])


_MOST_CLASSES = 8  # sets of ranks with equal logs, each compared with all other sets


def find_divergence(facts: EndingFacts) -> tuple[Position, Position] | None:
    """Return two ranks' positions at their first divergence, or None if logs are equal."""
    classes = sorted(group_by(facts.ranks, call_sequence).values(), key=len, reverse=True)
    for number, group in enumerate(classes[:_MOST_CLASSES]):  # starting with the most common log
        pairs = [pair for peers in classes[number + 1 :] if (pair := _compare_logs(group[0], peers[0])) is not None]
        if pairs:
            return min(pairs, key=lambda pair: pair[0])[1:]
    return None


def _compare_logs(side: RankAtEnd, peer: RankAtEnd) -> tuple[int, Position, Position] | None:
    shared = [[call for call in rank.calls if {side.rank, peer.rank} <= set(call.members)] for rank in (side, peer)]
    with_groups = [[replace(call, payload=f"{call.payload} {call.group}") for call in log] for log in shared]
    if (mismatch := first_unequal_call(with_groups)) is None:
        return None
    index = extra_call_index(with_groups)
    index = mismatch[0] if index is None else index
    return index, *(_position(rank, calls, index) for rank, calls in zip((side, peer), shared, strict=True))  # type: ignore[return-value]


def _position(rank: RankAtEnd, calls: Sequence[Call], index: int) -> Position:
    call = calls[index] if index < len(calls) else None
    if call is not None:
        return Position(rank, call, lines_of(call), calls[:index])
    other_calls = [call for call in rank.calls if call not in calls]  # in groups without the other rank
    lines = rank.lines or (lines_of(rank.calls[-1]) if other_calls and rank.calls[-1] is other_calls[-1] else ())
    return Position(rank, None, () if rank.ended else lines, calls)


def explain_by_unmatched_call(facts: EndingFacts, position: Position, peer: Position) -> list[Finding]:
    """DDP403: collective that one rank calls and others never reach. Runs last."""
    sides = [
        side for side in (_extra_call(facts, position, peer), _extra_call(facts, peer, position)) if side is not None
    ]
    if not sides:
        return ddp403.different_calls_finding(facts, position, peer)
    if len(sides) == 2:
        in_branch = [side for side in sides if side[2] is not None]
        heads = {side[2].head for side in sides if side[2] is not None}
        if len(in_branch) == 2 and len(heads) == 1:
            return ddp403.different_calls_finding(facts, position, peer)
        sides = in_branch if len(in_branch) == 1 else sorted(sides, key=lambda side: split_line(side[1]))
    caller, where, branch = sides[0]
    return ddp403.unmatched_call_finding(facts, caller, peer if caller is position else position, where, branch)


_ExtraCall = tuple[Position, str, Block | None]


def _extra_call(facts: EndingFacts, position: Position, peer: Position) -> _ExtraCall | None:
    """Return (position, innermost line that `peer` never reached, branch around this line), or None."""
    if position.call is not None and position.call.operation == DDP_FORWARD:
        backwards = filter(None, map(backward_of, peer.state.calls))
        if position.lines and position.lines[0] in {backward.line for backward in backwards}:
            return None  # without buffers only the backward pass is logged
    reached = {line for c in peer.state.calls for line in lines_of(c)} | {*peer.lines, *facts.current_stack(peer.state)}
    where = next((line for line in position.lines if line not in reached), None)
    if where is None or not (position.call or position.state.waits):
        return None
    return position, where, next(iter(local_branches(facts, position, peer)), None)


EXPLANATIONS = (
    ddp404.explain_by_exit,
    ddp401.explain_by_exception,  # early, because other explanations fit the same call
    ddp403.explain_by_join,  # before loaders, because `Join` allows uneven inputs
    ddp405.explain_by_loader,
    explain_by_skipped_pass,
    explain_by_branch,
    explain_by_skipped_end,
    explain_by_loop,
    ddp402.explain_by_work,
    explain_by_unmatched_call,
)
"""Explanations by positions in order, each tried for both orders of the two ranks."""


def diagnose_dumps(groups: Sequence[GroupLogs], at_end: Mapping[int, str], seen: RanksSeen) -> list[Finding]:
    """Return one finding per cause: mismatched calls, then ranks that other ranks wait for.

    `at_end`: what each rank with a dump was doing, in words.
    """
    by_key = {(group.name, group.members): group for group in groups}
    graph = WaitGraph(seen.dumps, by_key)
    findings, explained = list[Finding](), set(seen.at_work)
    if seen.is_live:  # a device may need longer than the time between two looks
        explained |= {rank for rank in graph.stopped | graph.devices.keys() if graph.open_calls[rank]}
    for group in groups:
        if group_findings := _judge_group(group, range(len(group.logs)), at_end, seen, graph):
            findings += group_findings
            explained.update(group.members)
    while stopped := graph.stopped - explained:  # explained by program lines, if the group has lines
        awaited: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for rank, call, peers in graph.waits_on(stopped):  # earliest first
            awaited.setdefault(graph.group(rank, call), set()).update(peers)
        best = max(by_key.keys() & awaited, key=lambda key: (len(awaited[key]), -[*awaited].index(key)), default=None)
        pending_ranks = graph.dumps.keys() - stopped
        if best is None or not (group_findings := _judge_group(by_key[best], pending_ranks, at_end, seen, graph)):
            break  # sends and receives only, or no explanation by lines
        findings += group_findings
        explained |= awaited[best]
    return findings + judge_waits(graph, explained, at_end, reports_missing_dumps=not seen.is_live)


def _judge_group(
    group: GroupLogs, pending_ranks: Collection[int], at_end: Mapping[int, str], seen: RanksSeen, graph: WaitGraph
) -> list[Finding]:
    """Report mismatched calls of a process group, explained by program lines if possible."""
    if not (mismatch := judge_divergences(group.logs, pending_ranks, {group.name: group.first})):
        return []
    members = tuple(sorted({*group.members} & at_end.keys()))
    ranks = [
        RankAtEnd(
            rank,
            [replace(call, members=members) for call in group.logs[rank]],
            group.first,
            at_end[rank],
            seen.lines.get(rank, ()),
            waits=rank not in seen.at_work,
            ended=rank in seen.over,
        )
        for rank in members
    ]
    lines = {line for rank in ranks for call in rank.calls for line in lines_of(call)}
    positions = EndingFacts(ranks, blocks_of_lines(lines))
    findings = explain_by_positions(FailureFacts(find_positions=lambda: positions), mismatch)
    if not findings and all(graph.open_calls.get(rank) for rank in set(group.members).difference(pending_ranks)):
        findings = mismatch
    which = [f"process group {group.name}"] if group.name != DEFAULT_GROUP else []
    waits, _ = graph.who_waits(group.members)
    return [replace(finding, evidence=(*which, *finding.evidence, *waits)) for finding in findings]


def judge_waits(
    graph: WaitGraph, explained: Collection[int], doing: Mapping[int, str], *, reports_missing_dumps: bool
) -> list[Finding]:
    """Return findings on ranks that other ranks wait for, one finding per root cause.

    `explained`: awaited ranks that need no finding, because they may still arrive or already have a finding.
    """
    findings = list[Finding]()
    if ranks := sorted(graph.devices.keys() - explained):
        findings += ddp402.explain_by_device(graph, ranks)
    if ranks := sorted(graph.stopped.difference(explained)):
        findings += ddp402.explain_by_stopped_ranks(graph, ranks, doing)
    if findings or explained:
        return findings
    if graph.missing:
        return ddp402.explain_by_missing_dumps(graph) if reports_missing_dumps else []
    return first_explanation(WAIT_EXPLANATIONS, graph)


WAIT_EXPLANATIONS = (
    ddp402.explain_by_late_rank,
    ddp402.explain_by_endless_call,
    ddp402.explain_by_circle_of_sends,
    ddp403.explain_by_circle_of_groups,
)
"""Explanations in order, if every awaited rank is in a collective itself."""
