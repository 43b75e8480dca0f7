"""Findings from the reports of the ranks of a watched loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpcheck.findings.evidence.steps import DdpStepEvidence, GradientState, PathEnd, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, format_steps, join_names, plural_verb
from ddpcheck.judge.gradients.reducer import judge_reducer
from ddpcheck.judge.gradients.sharded import judge_switched_off
from ddpcheck.judge.gradients.target_weights import judge_normalisation
from ddpcheck.judge.judge_context import JudgeContext
from ddpcheck.judge.loop.script_compilations import judge_compilations
from ddpcheck.judge.loop.training_loop import judge_loop, judge_values_changed
from ddpcheck.judge.parameters.missing_parameters import judge_parameters
from ddpcheck.judge.replicas import descriptions
from ddpcheck.judge.replicas.replica_state import judge_state
from ddpcheck.stream.rank_report import RankReport, ReplicaState, WatchContext, is_probed

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
        findings += descriptions.judge_changes([report.changes for report in reports], sharded=wrapper.sharded)
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
    findings = descriptions.judge_descriptions([item.description for item in states])
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
        start += [
            f for f in descriptions.judge_values_after_wrapping(never, [{} for _ in states]) if f.code == "DDP208"
        ]
        changed_early |= {name for finding in start for name in finding.subjects}
        changed = []
        for item in values:  # the other values changed in forward or backward
            others = {name: value for name, value in item.parameters.items() if name not in changed_early}
            changed.append(replace(item, parameters_before_optimizer=others, parameters={}))
        state = judge_state(changed, facts, gradients_differ=True)
    elif step == 0:
        early = not after_backward and not context.broadcasts_buffers  # buffers have no reason to differ yet
        start = descriptions.judge_values_after_wrapping(
            [item.parameters for item in values], [item.buffers if early else {} for item in values]
        )
        start = [f if first or f.code != "DDP208" else replace(f, **_UNAVERAGED) for f in start]
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
    if not (context.wrapper.comm_hook and descriptions.differing_names([item.gradients for item in values])):
        return False
    parameters = [item.parameters for item in values if item.parameters]
    return not step or (len(parameters) == len(values) and not descriptions.differing_names(parameters))


def _reword(finding: Finding, values: Sequence[DdpStepEvidence], step: int) -> Finding:
    """Reword a DDP306 of ranks not compared before: step and cause are unknown."""
    parted = descriptions.differing_names([item.parameters for item in values])
    ranks = {rank for ranks in parted.values() for rank in ranks}
    minority = len(values) > 2 and 2 * len(ranks) < len(values)
    differ = plural_verb("differs", "differ", finding.subjects)
    message = f"{join_names(finding.subjects)} {differ} between ranks after {counted(step, 'step')}."
    return replace(finding, message=message, steps=(), ranks=tuple(sorted(ranks)) if minority else ())


_UNAVERAGED: dict[str, Any] = {
    "code": "DDP306",
    "message": "Parameters differ between ranks, and no backward pass has been averaged so far.",
    "ranks": (),
    "evidence": (
        "gradients are averaged if the wrapper is called outside of no_sync, and backward begins with its output",
        "under Lightning's manual optimization: if self.manual_backward(loss) is called, and not loss.backward()",
    ),
}
_STANDING = ("DDP208", "DDP214", "DDP215", "DDP216", "DDP306")
