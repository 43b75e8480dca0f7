"""DDP111, 301, 302, 303, 306, 502 under `fully_shard`: gradients gathered from shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent, ShardedStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, join_names, one_finding, unless_all
from ddpcheck.judge.gradients.reducer import (
    ReducerFacts,
    explain_by_constant_factor,
    explain_by_ignored_parameters,
    explain_by_losses_of_parts,
    explain_by_missing_reduction,
    explain_by_parts_of_models,
    judge_unexplained_mismatch,
)
from ddpcheck.judge.gradients.script_alone import Steps
from ddpcheck.judge.judge_context import JudgeContext, first_explanation, group_by_step, worst_first
from ddpcheck.stream.ledger import Ledger

NOT_COMPARED = (
    "under fully_shard these are not compared: the reducer's buckets, its broadcast of parameters and buffers, and its "
    "search for unused parameters, which are DDP's own"
)


def why_not_updated(item: ShardedStep) -> str:
    """Return why updates are not compared with an unsharded step, or ''."""
    lost = [bad.name for bad in item.against_whole if bad.bad and bad.name not in item.updated_alone]
    if item.uncompared or not lost:
        return item.uncompared
    return f"in {join_names(lost)}, the rounding error of a step may be as large as the step"


_SWITCHES = {
    "set_requires_gradient_sync": "no gradient of its module is reduced",
    "set_requires_all_reduce": "gradients are reduced within each shard group, and not between the replicas",
}


def judge_sharded(evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> list[Finding]:
    """Judge gradients, loaded state and updates under `fully_shard`."""
    facts = ReducerFacts.of(evidence, known)
    findings = explain_by_ignored_parameters(facts) + first_explanation(EXPLANATIONS, facts)
    return findings + judge_loaded_state(evidence) or judge_updates(facts)


def judge_updates(facts: ReducerFacts) -> list[Finding]:
    """Report optimizer steps on shards that differ from the unsharded step (DDP306).

    Only parameters whose update depends on the local shard alone count: rounding in matrix orthogonalisation, for
    example, may be as large as the difference.
    """
    wrong = []
    for step, items in group_by_step(facts.evidence).items():
        sharded = [item for item in items if isinstance(item, ShardedStep)]
        local = frozenset.intersection(*(item.updated_alone for item in sharded)) if sharded else frozenset()
        wrong += [(step, bad) for item in sharded for bad in item.against_whole if bad.bad and bad.name in local]
    if not wrong:
        return []
    step = min(step for step, _ in wrong)
    by_name = {bad.name: bad for wrong_step, bad in wrong if wrong_step == step}
    names = list(by_name)
    updated_at = next(item.updated_at for item in facts.evidence if isinstance(item, ShardedStep))
    return facts.known.names.one_finding(
        "DDP306",
        names,
        f"The optimizer's step {step} on shards changes {counted(len(names), 'parameter')} differently from the same "
        "step on the whole parameters and gradients: each rank updates its shard without the others.",
        location=updated_at or facts.known.names.location(names),
        steps=unless_all(sorted({step for step, _ in wrong}), facts.step_count),
        evidence=[
            "errors are relative to the update of the whole parameter",
            *map(str, worst_first(by_name.values())[:3]),
        ],
        fix="Compute norms and means of the DTensor, or all_reduce those of the shards over the shard group.",
    )


def judge_shard_scales(steps: Sequence[Steps]) -> list[Finding]:
    """Report one optimizer's reduced shard gradients scaled by rank-dependent factors (DDP306)."""
    for by_rank in steps:
        factors = [_factor([*step.shard_scales.values()]) for step in by_rank]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(by_rank) or max(known) - min(known) <= _ANOTHER * max(known):
            continue
        first = by_rank[0]
        return one_finding(
            "DDP306",
            ("gradients",),
            "The gradients of the shards are scaled after their reduction, by a different factor on each rank: it is "
            "computed from a shard, not from the whole.",
            steps=(first.count,),
            location=first.norm_at or first.location,
            related={"optimizer steps": first.location},
            evidence=[
                f"rank {rank}: the norm of its shards is {factor:.6g} times that of all shards"
                for rank, factor in enumerate(known[:4])
            ],
            fix="Compute the norm of the DTensors (clip_grad_norm_ does), or all_reduce the squares of the shards' "
            "norms over the ranks, before the root is taken.",
        )
    return []


def judge_loaded_state(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """Report a recipe's optimizer state loaded from one rank on all (DDP521)."""
    items = [item for item in evidence if isinstance(item, ShardedStep) and not item.step]
    return state_of_one_rank(
        [item.loaded for item in items],
        next((item.updated_at for item in items), None),
        ["the optimizer has it before the first step, on every rank"],
    )


def state_of_one_rank(
    states: Sequence[Mapping[str, float]], line: Location | None, evidence: Sequence[str], steps: Sequence[int] = (0,)
) -> list[Finding]:
    """Report equal optimizer state on all ranks for different shards (DDP521).

    `states` are norms by rank. Step counters are replicated and ignored; norms of different shards differ.
    """
    norms = [{name: norm for name, norm in state.items() if norm and not name.endswith(": step")} for state in states]
    if len(norms) < 2 or len(set(norms[0].values())) < 2 or any(state != norms[0] for state in norms):
        return []
    keys = sorted({name.rpartition(": ")[2] for name in norms[0]})
    return one_finding(
        "DDP521",
        keys,
        f"Every rank has the same {join_names(keys)} for its part of each of "
        f"{counted(len({name.rpartition(': ')[0] for name in norms[0]}), 'parameter')}, where each should have a "
        "different part: the optimizer's state is that of one rank.",
        steps=tuple(steps),
        location=line,
        evidence=evidence,
        fix="Save and load the state of every rank: by torch.distributed.checkpoint, with "
        "get_optimizer_state_dict and set_optimizer_state_dict; or in a file for each rank.",
    )


_ANOTHER = 1e-3
_THE_SAME = 1e-4


def _factor(scales: Sequence[float]) -> float | None:
    """Return the common factor of at least two scales, or `None`."""
    equal = len(scales) > 1 and 0.0 < max(scales) < math.inf and max(scales) - min(scales) <= _THE_SAME * max(scales)
    return sum(scales) / len(scales) if equal else None


def judge_switched_off(evidence: Sequence[DdpStepEvidence]) -> list[Finding]:
    """Report optimizer steps that miss gradients because reduction is off (DDP502)."""
    unreduced = [(item, use) for item in evidence for use in Ledger(item.events).used_unreduced]
    if not unreduced:
        return []
    item, last = unreduced[-1]
    call = _switched_off(item.events)
    kind = call.kind if call is not None else "set_requires_gradient_sync"
    in_turn = any(event.kind == kind and event.synchronises for event in item.events)
    return one_finding(
        "DDP502",
        (kind,),
        f"{kind}(False) is in force in the last backward pass of a step, so {_SWITCHES[kind]}, and the optimizer steps "
        "without its gradients."
        if in_turn
        else f"{kind}(False) is in force in every backward pass, so {_SWITCHES[kind]}: those shards have "
        "no gradient, and the optimizer's steps do not change them.",
        ranks=unless_all(sorted({step.rank for step, _ in unreduced}), len(evidence)),
        location=Location.parse(call.location if call is not None and call.location else last.ended_by.location),
        related={"optimizer steps": Location.parse(last.ended_by.location)},
        fix=f"Call {kind}(True) before the last backward of a step, or leave it out.",
    )


def explain_by_switches(facts: ReducerFacts) -> list[Finding]:
    """Report a reduction switched off by the last relevant call (DDP502).

    Runs first: unreduced gradients are neither equal on all ranks nor the average.
    """
    wrong = list(dict.fromkeys((*facts.not_synchronised, *facts.wrong)))
    call = _switched_off(facts.evidence[0].events)
    if not wrong or call is None:
        return []
    count = len(facts.evidence[0].gradients)
    return one_finding(
        "DDP502",
        (call.kind,),
        f"{call.kind}(False) is in force in every backward of a step, so {_SWITCHES[call.kind]}: those of {len(wrong)} "
        f"of {counted(count, 'parameter')} are not the average of the ranks'.",
        location=Location.parse(call.location),
        fix=f"Call {call.kind}(True) before the last backward of a step, or leave it out.",
    )


def _switched_off(events: Sequence[LoopEvent]) -> LoopEvent | None:
    """Return the last call of a switch that left reduction off."""
    last = {event.kind: event for event in events if event.kind in _SWITCHES}
    return next((event for event in last.values() if not event.synchronises), None)


EXPLANATIONS = (
    explain_by_switches,
    explain_by_parts_of_models,
    explain_by_missing_reduction,
    explain_by_losses_of_parts,
    explain_by_constant_factor,
    judge_unexplained_mismatch,
)
"""Explanations, in order, of gradient mismatches under `fully_shard`."""
