"""Findings from the reports of the ranks of a watched loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import mul
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import Difference, relative
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence, GradientState, PathEnd, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, format_steps, group_by, join_names, plain_name, plural_verb
from ddpcheck.rules.compilation.ddp522_rank_dependent_compilation import judge_compilations
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import judge_switched_off
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_repeated
from ddpcheck.rules.gradients.reducer import judge_loop, judge_reducer
from ddpcheck.rules.loss.target_weights import judge_normalisation
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.replicas.ddp306_state_diverged import NEVER_AVERAGED
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changes
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_values_changed
from ddpcheck.rules.replicas.descriptions import judge_descriptions, judge_values_after_wrapping
from ddpcheck.rules.replicas.values import judge_state
from ddpcheck.stream.entries import ReplicaCaptured, Sketch, WrapperMade
from ddpcheck.stream.rank_report import RankReport, ReplicaState, WatchContext, is_probed
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.replicas import differing_names

_MOST_STEPS = 8


def judge_reports(reports: Sequence[RankReport], context: WatchContext, *, settled: bool) -> list[Finding]:
    """Return findings on parameters, parameter changes and the loop since the last reports.

    `reports`: of every rank that answered. `settled`: enough steps have been seen to judge what an option allows.
    """
    if context.wrapper.find_unused_parameters:  # temporarily frozen (GAN) is unused to DDP
        reports = [replace(r, changes={n: w for n, w in r.changes.items() if w != "frozen"}) for r in reports]
    changed = {name for report in reports for name in report.changes}
    evidence = _evidence(reports, context, changed, settled=settled)
    wrapper = context.wrapper
    opaque = any(report.probed.output_type for report in reports)  # reported before backward, without other facts
    if reports[0].step == 0 and not opaque:  # static_graph does not tolerate gradients that DDP awaits here
        wrapper = replace(wrapper, static_graph=False)
    missing_steps = tuple(sorted({step for report in reports for step in report.missing}))
    findings = []
    for finding in judge_parameters(evidence, wrapper, context.names, ends_here=False):
        if finding.code == "DDP109" and not settled:
            continue
        if wrapper.sharded and not settled and finding.code in _ON_NO_RANK:  # an untaken branch or idle expert
            continue
        if finding.code in _ABSENT and not finding.steps and not (context.wrapper.goes_on_without and settled):
            finding = replace(finding, steps=missing_steps)
        if finding.code == "DDP101" and not settled and reports[0].step < _FEW:
            message = f"{finding.message[:-1]} in {format_steps(missing_steps or (0,))}."
            finding = replace(finding, message=message, fix=_IDLE)
        findings.append(finding)
    if changed:
        findings += judge_changes([report.changes for report in reports], sharded=wrapper.sharded)
    if any(report.events for report in reports):
        loop = [DdpStepEvidence(report.probed.rank, report.step, events=report.events) for report in reports]
        findings += judge_switched_off(loop) if wrapper.sharded else judge_loop(loop, unequal=True)
    findings += judge_compilations([report.compiled for report in reports])
    return findings + judge_normalisation([report.micro_batches for report in reports])


_FEW = 4  # first steps: a parameter not read by forward may belong to an idle branch or expert


_IDLE = (
    "If other steps read it (a branch, an expert that gets no sample), pass find_unused_parameters=True, or add 0.0 "
    "times its output in idle steps. If no step does, use it, remove it, or freeze it with requires_grad_(False) "
    "before wrapping."
)


_ON_NO_RANK = ("DDP101", "DDP102", "DDP103")


_ABSENT = (*_ON_NO_RANK, "DDP104", "DDP105", "DDP513")


def _evidence(
    reports: Sequence[RankReport], context: WatchContext, changed: set[str], *, settled: bool
) -> list[StepEvidence]:
    """Return the reports as evidence: every rank in each step with a missing parameter."""
    trainable = [name for name in context.trainable if name not in changed]
    steps = sorted({step for report in reports for step in report.missing})[:_MOST_STEPS]
    if context.wrapper.goes_on_without and settled:
        steps = [step for step in range(reports[0].step + 1) if is_probed(step)]
    elif steps and steps[0] > 0:
        steps.insert(0, steps[0] - 1)  # in which the parameters took part
    evidence = []
    for report in reports:
        for index, step in enumerate(steps or [report.step]):
            missing = set(report.missing.get(step, ()))
            if context.wrapper.goes_on_without and settled:
                missing |= set(report.never_used) | set(report.sometimes_missing if index == 0 else ())
            states: dict[str, GradientState] = {
                name: "missing" if name in missing else report.probed.states.get(name, "contributes")
                for name in trainable
            }
            ends = {name: report.ends.get(name, PathEnd("unknown")) for name in trainable if name in missing}
            path_ends = {**ends, **report.probed.path_ends}
            evidence.append(replace(report.probed, step=step, states=states, path_ends=path_ends))
    return evidence


def judge_replica_states(
    states: Sequence[ReplicaState], context: WatchContext, step: int, *, after_backward: bool, first: bool
) -> list[Finding]:
    """Return findings on mismatched replicas (DDP2xx, 301 to 303, 306)."""
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
    if after_backward and averages_elsewhere(values, context, step):
        gradients = []
    known_subjects = {subject for finding in findings for subject in finding.subjects}
    if step == 0 and after_backward and context.began_alike:
        start = [
            replace(finding, evidence=("before the first forward: a checkpoint that was loaded there, say",))
            for finding in judge_values_changed([s.constructed for s in states], [s.at_first_forward for s in states])
        ]
        changed_early = {name for finding in start for name in finding.subjects}
        never = [{n: v for n, v in s.at_first_forward.items() if n not in changed_early} for s in states]
        start += [f for f in judge_values_after_wrapping(never, [{} for _ in states]) if f.code == "DDP208"]
        changed_early |= {name for finding in start for name in finding.subjects}
        changed = []
        for item in values:  # the other values changed in forward or backward
            others = {name: value for name, value in item.parameters.items() if name not in changed_early}
            changed.append(replace(item, parameters_before_optimizer=others, parameters={}))
        state = judge_state(changed, facts, gradients_differ=True)
    elif step == 0:
        early = not after_backward and not context.broadcasts_buffers  # buffers have no reason to differ yet
        start = judge_values_after_wrapping(
            [item.parameters for item in values], [item.buffers if early else {} for item in values]
        )
        start = [f if first or f.code != "DDP208" else replace(f, **NEVER_AVERAGED) for f in start]
        kept = [replace(item, parameters={}, buffers=item.buffers if after_backward else {}) for item in values]
        state = judge_state(kept, facts, gradients_differ=True)
    else:  # values after the last optimizer step
        start = []
        state = judge_state([replace(item, step=step - 1) for item in values], facts, gradients_differ=bool(gradients))
        state = [_reword(finding, values, step) if finding.code == "DDP306" else finding for finding in state]
    for finding in (*start, *gradients, *state):
        if not known_subjects.issuperset(finding.subjects):
            findings.append(finding if finding.steps or finding.code in _STANDING else replace(finding, steps=(step,)))
    return findings


def averages_elsewhere(values: Sequence[DdpStepEvidence], context: WatchContext, step: int) -> bool:
    """Return True if a comm hook may leave gradients for the script to average.

    Parameters then stay equal on all ranks. In step 0, parameters are equal with any hook.
    """
    if not (context.wrapper.comm_hook and differing_names([item.gradients for item in values])):
        return False
    parameters = [item.parameters for item in values if item.parameters]
    return not step or (len(parameters) == len(values) and not differing_names(parameters))


def _reword(finding: Finding, values: Sequence[DdpStepEvidence], step: int) -> Finding:
    """Reword a DDP306 of ranks not compared before: step and cause are unknown."""
    parted = differing_names([item.parameters for item in values])
    ranks = {rank for ranks in parted.values() for rank in ranks}
    minority = len(values) > 2 and 2 * len(ranks) < len(values)
    differ = plural_verb("differs", "differ", finding.subjects)
    message = f"{join_names(finding.subjects)} {differ} between ranks after {counted(step, 'step')}."
    return replace(finding, message=message, steps=(), ranks=tuple(sorted(ranks)) if minority else ())


_STANDING = ("DDP208", "DDP214", "DDP215", "DDP216", "DDP306")


_Value = TypeVar("_Value")


_ROUNDINGS = 16  # in units of machine epsilon: rounding of two sums per step, and of a sketch


_EPS = 2.0**-23  # of float32


_TOLERANCE = 1e-3  # relative error of a float32 sketch, from sums of many elements


def without_rounding(replicas: Sequence[ReplicaCaptured]) -> Sequence[ReplicaCaptured]:
    """Give parameters that differ between ranks by rounding only the same fingerprint.

    For example, SAM moves parameters by a rank-local `e` and back before the optimizer's step, and `p + e - e` is not
    exactly `p`. Rounding accumulates over the steps like a random walk.
    """
    growth = _ROUNDINGS * math.sqrt(replicas[0].step + 1)
    rounded = {}
    for name in differing_names([replica.state.values.parameters for replica in replicas]):
        values = [replica.values[name] for replica in replicas if name in replica.values]
        if len(values) == len(replicas):
            tolerance = growth * max(replica.eps.get(name, _EPS) for replica in replicas)
            if relative(max(math.dist(values[0], sketch) for sketch in values), math.hypot(*values[0])) <= tolerance:
                rounded[name] = replicas[0].state.values.parameters[name]
    return _with_values(replicas, lambda values: replace(values, parameters={**values.parameters, **rounded}))


def without_alike_later(
    replicas: Sequence[ReplicaCaptured], later: Sequence[Mapping[str, int]]
) -> Sequence[ReplicaCaptured]:
    """Drop buffers that differ in a step but are equal before the next step.

    `later`: buffers at the start of the next step, by rank; nothing is dropped if unknown on some rank.
    """
    if len(later) < len(replicas):
        return replicas
    equal = later[0].keys() - differing_names(later).keys()
    return _with_values(
        replicas, lambda values: replace(values, buffers={n: v for n, v in values.buffers.items() if n not in equal})
    )


def _with_values(
    replicas: Sequence[ReplicaCaptured], change: Callable[[DdpStepEvidence], DdpStepEvidence]
) -> list[ReplicaCaptured]:
    return [replace(replica, state=replace(replica.state, values=change(replica.state.values))) for replica in replicas]


def judge_captured(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge a step captured on all ranks (`first`: the first captured step)."""
    if replicas[0].shard >= 0:
        return _judge_shards(entry, step, replicas, first=first)
    if len({frozenset(replica.eps) for replica in replicas}) > 1:  # only some ranks have compiled the module
        replicas = [*map(_as_written, replicas)]
    states = [replica.state for replica in replicas]
    differences = _differences(replicas)
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
    return [finding if first or finding.code != "DDP222" else replace(finding, steps=(step,)) for finding in findings]


def _as_written(replica: ReplicaCaptured) -> ReplicaCaptured:
    """Rename captured tensors to uncompiled names (`_orig_mod` removed)."""

    def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {plain_name(name): value for name, value in values.items()}

    values = replica.state.values
    by_name: dict[str, Any] = {field: named(getattr(values, field)) for field in ("parameters", "gradients", "buffers")}
    fields: dict[str, Any] = {field: named(getattr(replica, field)) for field in ("own", "averaged", "eps", "values")}
    return replace(replica, state=replace(replica.state, values=replace(values, **by_name)), **fields)


def _judge_shards(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge `fully_shard`: state common to all ranks, reduced gradients, replicated shards."""
    whole = [
        replace(
            replica,
            shard=-1,
            own={},
            state=replace(replica.state, values=replace(replica.state.values, gradients={}, parameters={})),
        )
        for replica in replicas
    ]
    findings = judge_captured(entry, step, whole, first=first)
    values = [
        DdpStepEvidence(replica.state.values.rank, step, against_local=tuple(against))
        for replica, against in zip(replicas, against_average(replicas), strict=True)
    ]
    if any(difference.bad for value in values for difference in value.against_local):
        states = [ReplicaState(ModuleDescription(), value) for value in values]
        findings += judge_replica_states(states, entry.context, step, after_backward=True, first=first)
    findings += judge_repeated(replicas)
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
            fix = finding.fix
            if finding.code == "DDP208":
                fix = "fully_shard broadcasts nothing: give all replicas the same values before it, or hand rank 0's "
                fix += "values out after it (set_model_state_dict with broadcast_from_rank0)."
            by_code[finding.code] = replace(most, ranks=tuple(sorted(finding_ranks)), evidence=(), fix=fix)
    return [*findings, *by_code.values()]


def against_average(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far reduced gradients are from the ranks' average."""
    if replicas[0].shard < 0:
        return _differences(replicas)
    return [
        _differences(
            [  # other ranks' reduced gradients belong to other shards
                replace(peer, own=_own_of(peer, replica.shard), averaged=replica.averaged if peer is replica else {})
                for peer in replicas
            ]
        )[index]
        for index, replica in enumerate(replicas)
    ]


def _own_of(replica: ReplicaCaptured, shard: int) -> dict[str, Sketch]:
    """Return sketches of a rank's own gradients that are reduced onto `shard`."""
    parts = ((*name.partition("/"), numbers) for name, numbers in replica.own.items())
    return {name: numbers for number, _, name, numbers in parts if number == str(shard)}


def _differences(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far sketches of averaged gradients are from the average."""
    names = list(dict.fromkeys(name for replica in replicas for name in replica.own))
    owns = {name: [replica.own[name] for replica in replicas if name in replica.own] for name in names}
    scales = {name: math.hypot(*chain.from_iterable(owns[name])) / math.sqrt(len(replicas)) for name in names}
    wanted = {name: [sum(numbers) / len(replicas) for numbers in zip(*owns[name], strict=True)] for name in names}
    diffs: list[list[Difference]] = []
    for replica in replicas:
        cached = (
            rank_diffs
            for peer, rank_diffs in zip(replicas, diffs, strict=False)
            if (peer.averaged, peer.eps, peer.hook) == (replica.averaged, replica.eps, replica.hook)
        )
        rank_diffs = next(cached, None)
        diffs.append(_differences_of(replica, wanted, scales, len(replicas)) if rank_diffs is None else rank_diffs)
    return diffs


def _differences_of(
    replica: ReplicaCaptured, wanted: Mapping[str, Sequence[float]], scales: Mapping[str, float], world_size: int
) -> list[Difference]:
    differences = []
    for name, want in wanted.items():
        scale = scales[name]
        if replica.hook:  # hooks may round away near-zero gradients, e.g. of a bias before BatchNorm
            scale = max(value for n, value in scales.items() if n.rpartition(".")[0] == name.rpartition(".")[0])
        got = replica.averaged.get(name) or [0.0] * len(want)
        if not all(map(math.isfinite, (*want, *got))):
            return []  # overflow: a gradient scaler skips the step
        tolerance = max(_TOLERANCE, (8 + world_size) * replica.eps.get(name, 0.0))
        delta, norm = math.dist(got, want), math.hypot(*want)
        ratio = sum(map(mul, got, want)) / power if (power := norm * norm) else 0.0
        residual = math.dist(got, [ratio * number for number in want])
        differences.append(
            Difference(
                name,
                relative(delta, scale),
                tolerance,
                ratio=ratio,
                residual=relative(residual, scale),
                elements=len(want),
                absolute_error=delta,
                reference_norm=norm,
            )
        )
    return differences
