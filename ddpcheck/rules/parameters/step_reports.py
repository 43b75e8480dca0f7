"""Findings from the reports of the ranks of a watched loop."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import DdpStepEvidence, GradientState, PathEnd, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.rules.compilation.ddp522_rank_dependent_compilation import judge_compilations
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import judge_switched_off
from ddpcheck.rules.gradients.reducer import judge_loop
from ddpcheck.rules.loss.losses import judge_target_weights
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.parameters.ddp101_unused_parameter import reword_in_first_steps
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changes
from ddpcheck.stream.rank_report import RankReport, WatchContext, is_probed

_MOST_STEPS = 8


def judge_reports(reports: Sequence[RankReport], context: WatchContext, *, settled: bool) -> list[Finding]:
    """Return findings on parameters, parameter changes and the loop since the last reports.

    `reports`: one for each rank that answered. `settled`: True after enough steps for findings that later steps may
    refute.
    """
    if context.wrapper.find_unused_parameters:  # temporarily frozen (GAN) is unused to DDP
        reports = [replace(r, changes={n: w for n, w in r.changes.items() if w != "frozen"}) for r in reports]
    changed = {name for report in reports for name in report.changes}
    evidence = _to_step_evidence(reports, context, changed, settled=settled)
    wrapper = context.wrapper
    opaque = any(report.probed.output_type for report in reports)  # reported before backward, without other facts
    if reports[0].step == 0 and not opaque:  # static_graph does not tolerate gradients that DDP awaits here
        wrapper = replace(wrapper, static_graph=False)
    missing_steps = tuple(sorted({step for report in reports for step in report.missing}))
    findings = []
    for finding in judge_parameters(evidence, wrapper, context.names, ends_here=False):
        rule = RULES[finding.code]
        may_be_idle = wrapper.sharded and rule.no_gradient and not rule.conditional_use  # an untaken branch or expert
        if not settled and (rule.needless_option or may_be_idle):
            continue
        if rule.no_gradient and not finding.steps and not (context.wrapper.continues_unused and settled):
            finding = replace(finding, steps=missing_steps)
        if not settled and reports[0].step < _FIRST_STEPS:
            finding = reword_in_first_steps(finding, missing_steps or (0,))
        findings.append(finding)
    if changed:
        findings += judge_changes([report.changes for report in reports], sharded=wrapper.sharded)
    if any(report.events for report in reports):
        loop = [DdpStepEvidence(report.probed.rank, report.step, events=report.events) for report in reports]
        findings += judge_switched_off(loop) if wrapper.sharded else judge_loop(loop, unequal=True)
    findings += judge_compilations([report.compiled for report in reports])
    return findings + judge_target_weights([report.micro_batches for report in reports])


_FIRST_STEPS = 4  # first steps: a parameter not read by forward may belong to an idle branch or expert


def _to_step_evidence(
    reports: Sequence[RankReport], context: WatchContext, changed: set[str], *, settled: bool
) -> list[StepEvidence]:
    """Return the evidence of every rank in each step with a missing parameter."""
    trainable = [name for name in context.trainable if name not in changed]
    steps = sorted({step for report in reports for step in report.missing})[:_MOST_STEPS]
    if context.wrapper.continues_unused and settled:
        steps = [step for step in range(reports[0].step + 1) if is_probed(step)]
    elif steps and steps[0] > 0:
        steps.insert(0, steps[0] - 1)  # in which the parameters took part
    evidence = []
    for report in reports:
        for index, step in enumerate(steps or [report.step]):
            missing = set(report.missing.get(step, ()))
            if context.wrapper.continues_unused and settled:
                missing |= set(report.never_used) | set(report.sometimes_missing if index == 0 else ())
            states: dict[str, GradientState] = {
                name: "missing" if name in missing else report.probed.states.get(name, "contributes")
                for name in trainable
            }
            ends = {name: report.ends.get(name, PathEnd("unknown")) for name in trainable if name in missing}
            path_ends = {**ends, **report.probed.path_ends}
            evidence.append(replace(report.probed, step=step, states=states, path_ends=path_ends))
    return evidence
