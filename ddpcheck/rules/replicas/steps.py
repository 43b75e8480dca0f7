"""Judges of replicas after each step, and the lines of their findings."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_skipped_update
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_equal_shards
from ddpcheck.rules.gradients.reducer import judge_reducer
from ddpcheck.rules.replicas.comparisons import IN_STEP
from ddpcheck.rules.replicas.ddp208_parameter_value import advise_under_sharding, judge_initial_parameters
from ddpcheck.rules.replicas.ddp214_buffer_value import judge_drifted_buffers, judge_initial_buffers
from ddpcheck.rules.replicas.ddp215_buffer_overwritten import judge_overwritten_buffers
from ddpcheck.rules.replicas.ddp216_unregistered_state import judge_new_state, judge_unregistered_state
from ddpcheck.rules.replicas.ddp222_module_structure_or_mode import add_step
from ddpcheck.rules.replicas.ddp306_state_diverged import (
    judge_diverged_state,
    judge_never_averaged,
    reword_as_never_averaged,
    reword_at_unknown_step,
)
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import (
    judge_changed_in_step,
    judge_parameters_before_optimizer,
    judge_values_changed,
)
from ddpcheck.rules.replicas.descriptions import judge_descriptions
from ddpcheck.stream.entries import ReplicaCaptured, WrapperMade
from ddpcheck.stream.rank_report import ReplicaState, WatchContext
from ddpcheck.trace.captured import (
    compare_with_average,
    may_average_by_hand,
    unsharded_differences,
    with_values,
    without_prefixes,
)
from ddpcheck.trace.check_context import JudgeContext, group_by_step
from ddpcheck.trace.replicas import Changes, ReplicaFacts


def judge_state(
    evidence: Sequence[DdpStepEvidence],
    known: JudgeContext,
    *,
    gradients_differ: bool,
    start: Sequence[Mapping[str, int]] = (),
) -> list[Finding]:
    """Judge state that diverges between ranks in the steps.

    `start`: parameters before step 0, by rank. `gradients_differ`: True if gradients explain diverged parameters.
    """
    facts = ReplicaFacts(group_by_step(evidence), start, known)
    return [
        *judge_parameters_before_optimizer(facts),
        *([] if gradients_differ else _judge_divergence(facts)),
        *judge_drifted_buffers(facts),
        *judge_overwritten_buffers(facts),
        *(judge_new_state(facts) if known.gradients_differ else []),
        *judge_unregistered_state(facts),
    ]


def _judge_divergence(facts: ReplicaFacts) -> list[Finding]:
    divergence = facts.first_divergence()
    if divergence is None:
        return judge_never_averaged(facts)
    return (
        judge_changed_in_step(facts, divergence)
        or judge_skipped_update(facts, divergence)
        or judge_diverged_state(facts, divergence)
    )


def judge_replica_states(
    states: Sequence[ReplicaState], context: WatchContext, step: int, *, after_backward: bool, first: bool
) -> list[Finding]:
    """Compare a module's replicas in a step (`first`: it is the first comparison)."""
    values = [item.values for item in states]
    facts = JudgeContext(
        context.names,
        context.wrapper,
        len(states),
        broadcasts_buffers=context.broadcasts_buffers,
        wrapper_class=context.wrapper_class,
        own_hook=context.own_hook,
    )
    findings = judge_descriptions([item.description for item in states])
    gradients = judge_reducer(values, facts)
    if after_backward and may_average_by_hand(values, context, step):
        gradients = []
    known_subjects = {subject for finding in findings for subject in finding.subjects}
    if step == 0 and after_backward and context.began_alike:
        start = [
            replace(finding, evidence=("before the first forward: a checkpoint that was loaded there, say",))
            for finding in judge_values_changed([s.constructed for s in states], [s.at_first_forward for s in states])
        ]
        start += judge_initial_parameters(_drop_subjects([state.at_first_forward for state in states], start))
        changed_later = _drop_subjects([item.parameters for item in values], start)  # in forward or backward
        changed = [
            replace(item, parameters_before_optimizer=parameters, parameters={})
            for item, parameters in zip(values, changed_later, strict=True)
        ]
        state = judge_state(changed, facts, gradients_differ=True)
    elif step == 0:
        start = judge_initial_parameters([item.parameters for item in values])
        start = start if first else [*map(reword_as_never_averaged, start)]
        if not after_backward and not context.broadcasts_buffers:  # buffers have no reason to differ yet
            start += judge_initial_buffers([item.buffers for item in values])
        kept = [replace(item, parameters={}, buffers=item.buffers if after_backward else {}) for item in values]
        state = judge_state(kept, facts, gradients_differ=True)
    else:  # values after the last optimizer step
        start = []
        state = judge_state([replace(item, step=step - 1) for item in values], facts, gradients_differ=bool(gradients))
        state = [reword_at_unknown_step(finding, values, step) for finding in state]
    for finding in (*start, *gradients, *state):
        if not known_subjects.issuperset(finding.subjects):
            in_step = finding in gradients or IN_STEP in finding.tags
            findings.append(replace(finding, steps=(step,)) if in_step and not finding.steps else finding)
    return findings


def _drop_subjects(values: Sequence[Mapping[str, int]], findings: Sequence[Finding]) -> list[dict[str, int]]:
    subjects = {name for finding in findings for name in finding.subjects}
    return [{name: value for name, value in by_name.items() if name not in subjects} for by_name in values]


def judge_captured(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Compare the states of all replicas at a step (`first`: the first recorded step)."""
    if replicas[0].shard >= 0:
        return _judge_shards(entry, step, replicas, first=first)
    if len({frozenset(replica.eps) for replica in replicas}) > 1:  # only some ranks have compiled the module
        replicas = [*map(without_prefixes, replicas)]
    states = [replica.state for replica in replicas]
    differences = unsharded_differences(replicas)
    all_equal = len({repr(replace(state, values=replace(state.values, rank=0))) for state in states}) == 1
    if all_equal and not any(difference.bad for rank_diffs in differences for difference in rank_diffs):
        return []
    states = [
        replace(state, values=replace(state.values, against_local=tuple(rank_diffs)))
        for state, rank_diffs in zip(states, differences, strict=True)
    ]
    hook = next((replica for replica in replicas if replica.own_hook), replicas[0])
    wrapper = replace(entry.context.wrapper, comm_hook=hook.hook)
    context = replace(entry.context, wrapper=wrapper, own_hook=hook.own_hook)
    findings = judge_replica_states(states, context, step, after_backward=True, first=first)
    return findings if first else [add_step(finding, step) for finding in findings]


def _judge_shards(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge `fully_shard`: state common to all ranks, reduced gradients, replicated shards."""
    unsharded = with_values(replicas, lambda values: replace(values, gradients={}, parameters={}))
    unsharded = [replace(replica, shard=-1, own={}) for replica in unsharded]
    findings = judge_captured(entry, step, unsharded, first=first)
    values = [
        DdpStepEvidence(replica.state.values.rank, step, against_local=tuple(against))
        for replica, against in zip(replicas, compare_with_average(replicas), strict=True)
    ]
    if any(difference.bad for value in values for difference in value.against_local):
        states = [ReplicaState(ModuleDescription(), value) for value in values]
        findings += judge_replica_states(states, entry.context, step, after_backward=True, first=first)
    findings += judge_equal_shards(replicas)
    by_code: dict[str, Finding] = {}
    for group in group_by(replicas, lambda replica: replica.shard).values():
        bare = [
            replace(
                rep, shard=-1, own={}, state=ReplicaState(ModuleDescription(), replace(rep.state.values, buffers={}))
            )
            for rep in group
        ]
        ranks = [replica.state.values.rank for replica in bare]  # finding.ranks are indices into this list
        for finding in judge_captured(entry, step, bare, first=first) if len(bare) > 1 else []:
            previous = by_code.get(finding.code)
            most = finding if previous is None or len(previous.subjects) < len(finding.subjects) else previous
            finding_ranks = {ranks[index] for index in finding.ranks} | set(() if previous is None else previous.ranks)
            merged = replace(most, ranks=tuple(sorted(finding_ranks)), evidence=(), fix=finding.fix)
            by_code[finding.code] = advise_under_sharding(merged)
    return [*findings, *by_code.values()]


def locate_change(finding: Finding, changes: Changes, wrapped_at: Location | None) -> Finding:
    """Relocate a finding to the line changing the module, if the rule has `relocate`."""
    relocate: Callable[..., Finding] | None = getattr(_rule_module(finding.code), "relocate", None)
    return relocate(finding, changes, wrapped_at) if relocate else finding


@functools.cache
def _rule_module(code: str) -> ModuleType:
    (file,) = Path(__file__).parents[1].glob(f"*/{code.lower()}_*.py")
    return importlib.import_module(f"ddpcheck.rules.{file.parent.name}.{file.stem}")
