"""Judges of the wrappers of a script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from ddpcheck.findings.evidence.loop import GradientsHooked, ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.evidence.steps import StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity, select_findings
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import assignment_in_classes, last_assignment
from ddpcheck.findings.wording import group_by, join_names, plural_verb
from ddpcheck.rules.causes import ReportedCauses
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_meshes
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import judge_hooked
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import locate_condition
from ddpcheck.rules.gradients.ddp521_shard_as_whole import locate_load
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_scaled_by_hooks
from ddpcheck.rules.loss.ddp305_loss_normalisation import settle_severity
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import is_refuted
from ddpcheck.rules.parameters.step_reports import judge_reports
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_values_before_sharding, locate_seed
from ddpcheck.rules.replicas.ddp221_wrapper_options import judge_wrapper_options
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_local_sgd
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import is_averaged_by_hand, judge_assigned, judge_replaced
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_local_writes
from ddpcheck.rules.replicas.descriptions import COUNTED_BY_VARIABLE, judge_constructions
from ddpcheck.rules.replicas.steps import judge_captured, locate_change
from ddpcheck.stream.entries import BuffersKept, LocalSgdEnd, StepsReported
from ddpcheck.stream.rank_report import RankReport
from ddpcheck.trace.captured import without_later_equal, without_rounding
from ddpcheck.trace.gradients import BY_FACTOR
from ddpcheck.trace.losses import are_for_sums, scales_loss_for_sums
from ddpcheck.trace.script_facts import ScriptFacts, WrapperTrace, first_steps
from ddpcheck.trace.wrappers import Constructions, Wrappers


@rule
def judge_before_wrapping(constructed: Constructions) -> list[Finding]:
    """Return findings on modules about to be wrapped, each at the line to edit."""
    facts, findings = constructed.facts, []
    for finding in judge_constructions(facts.events(WrapperBegun)):
        if COUNTED_BY_VARIABLE in finding.tags and finding.location is not None:
            variable = finding.tags[finding.tags.index(COUNTED_BY_VARIABLE) + 1]
            finding = replace(
                finding, location=facts.source.ask(last_assignment, finding.location, variable) or finding.location
            )
        findings.append(finding)
    return findings


@rule
def judge_wrappers(wrappers: Wrappers) -> list[Finding]:
    """Return findings on every wrapper, over all steps."""
    facts, findings = wrappers.facts, []
    for wrapper in facts.wrappers:
        info, are_sums = wrapper.made, scales_loss_for_sums(wrapper)
        averages_by_hand = facts.averages_by_hand(wrapper.number)
        note = f"in the {info.module} that is wrapped{f' at {info.location}' if info.location else ''}"
        for finding in _judge_wrapper(facts, wrapper):
            is_intended = (averages_by_hand and RULES[finding.code].needs_average) or (
                are_sums and BY_FACTOR in finding.tags
            )
            if is_intended or (info.by_library and finding.severity is Severity.NOTE):  # not the script's own options
                continue
            notes = (note,) if len(facts.wrappers) > 1 else ()
            findings.append(replace(finding, evidence=(*finding.evidence, *notes)))
    for group in group_by(facts.wrappers, lambda wrapper: wrapper.number).values():
        findings += [] if facts.model_groups else judge_meshes(group, facts.world_size)
    return locate_restored_file(findings, facts.events(FileUsed))


_Reports = Mapping[int, Mapping[int, Sequence[RankReport]]]  # by step and rank


def _judge_wrapper(facts: ScriptFacts, wrapper: WrapperTrace) -> list[Finding]:
    info, changes = wrapper.made, wrapper.events(ModuleChanged)
    reports = _group_reports(wrapper)
    reported, more_buffers = _judge_steps(facts, wrapper, reports)
    values = [replica.state.values for replica in chain.from_iterable(wrapper.captured.values())]
    nonzero = {name for value in values for name, gradient in value.gradients.items() if gradient}
    reports_by_rank = [
        [report for by_rank in reports.values() for report in by_rank.get(rank.started.rank, ())]
        for rank in wrapper.ranks
    ]
    findings = []
    for finding in reported.findings:
        if is_refuted(finding, nonzero) or is_averaged_by_hand(facts, wrapper.number, finding):
            continue
        settled = settle_severity(add_later_buffers(finding, more_buffers), reports_by_rank)
        findings.append(locate_load(settled, facts.events(FileUsed), info.location))
    located = (locate_condition(finding, facts) for finding in (*findings, *reported.consequences.values()))
    first = [step for rank in wrapper.ranks for step in first_steps(rank)[:1]]
    return [
        *_judge_changes(wrapper, nonzero),
        *(locate_seed(locate_change(finding, changes, info.location), first) for finding in located),
    ]


def _judge_changes(wrapper: WrapperTrace, trained: Collection[str]) -> list[Finding]:
    """Judge the script's hooks on the wrapped module, and its writes to it."""
    changes, hooks, steps = wrapper.events(ModuleChanged), wrapper.events(GradientsHooked), list(wrapper.compared)
    findings = [*judge_assigned(changes), *judge_replaced(changes)]
    if wrapper.missing:
        return findings
    findings += judge_hooked(hooks, steps)
    if not are_for_sums(wrapper.losses, wrapper.number):
        findings += judge_scaled_by_hooks(hooks, steps, trained)
    shards = {replica.shard for replica in chain.from_iterable(wrapper.captured.values())}
    if wrapper.made.context.sharded is not None and len(shards) == len(wrapper.made.ranks) > 1:
        findings += judge_local_writes(changes, [context.values_built for context in wrapper.sharded])
    return findings


def _group_reports(wrapper: WrapperTrace) -> _Reports:
    """Return each step's reports by rank, without interim reports of steps that ended."""
    reports: dict[int, dict[int, list[RankReport]]] = {}
    for rank, entries in zip(wrapper.ranks, wrapper.events(StepsReported), strict=True):
        for entry in entries:
            is_final = not entry.is_unfinished or rank.counts[wrapper.number][1] <= entry.report.step
            if is_final and not entry.closing and not entry.is_conclusive:
                reports.setdefault(entry.report.step, {}).setdefault(rank.started.rank, []).append(entry.report)
    return reports


def _judge_steps(facts: ScriptFacts, wrapper: WrapperTrace, reports: _Reports) -> tuple[ReportedCauses, dict[str, int]]:
    """Judge all steps; also map buffers that begin to differ later to that step."""
    info, entries = wrapper.made, [*chain.from_iterable(wrapper.events(StepsReported))]

    def locate(finding: Finding) -> Finding:
        if finding.location or not finding.subjects:
            return finding
        line = wrapper.loss_line if finding.subjects == ("loss",) else None
        if RULES[finding.code].at_step:
            line = _optimizer_step_line(facts, f"{wrapper.number}/{finding.subjects[0]}")
        construction_line = line or facts.source.ask(assignment_in_classes, info.classes, finding.subjects[0])
        return replace(finding, location=construction_line or info.location)

    reported = ReportedCauses()
    more_buffers: dict[str, int] = {}
    if not wrapper.missing:
        captured = wrapper.captured
        kept_buffers = group_by(chain.from_iterable(wrapper.events(BuffersKept)), lambda event: event.step)
        if sharded := wrapper.sharded:
            built = judge_values_before_sharding([context.values_built for context in sharded], {})
            reported.add(select_findings(built), locate)
            policies = [context.policies for context in sharded]
            reported.add(judge_wrapper_options(policies, "What fully_shard was given"), locate)
        for step in sorted(reports.keys() | captured.keys()):
            step_findings = _judge_step(wrapper, step, reports[step]) if step in reports else []
            if len(captured.get(step, ())) == len(wrapper.ranks):
                buffers = [event.buffers for event in kept_buffers.get(step, ())]
                replicas = without_later_equal(without_rounding(captured[step]), buffers)
                step_findings += judge_captured(info, step, replicas, first=step == min(captured))
            reported.add(select_findings(step_findings), locate)
            collect_later_buffers(more_buffers, reported.findings, step_findings, step)
        closing = [entry.report for entry in entries if entry.closing]
        if len(closing) == len(wrapper.ranks):
            reported.add(select_findings(judge_reports(closing, info.context, settled=True)), locate)
        reported.add(select_findings(judge_local_sgd(wrapper.events(LocalSgdEnd))), locate)
    for entry in entries:
        if entry.is_conclusive and not entry.closing:
            reported.add(select_findings(judge_reports([entry.report], info.context, settled=False)), locate)
    return reported, more_buffers


def _optimizer_step_line(facts: ScriptFacts, name: str) -> Location | None:
    return next(
        (opt.steps[0][0].location for opt in facts.optimizers if opt.steps and name in opt.steps[0][0].ddp_params), None
    )


def collect_later_buffers(more: dict[str, int], reported: Sequence[Finding], new: Sequence[Finding], step: int) -> None:
    """Add (buffer, `step`) to `more` for newly differing buffers, if other buffers were reported."""
    known = {name for finding in reported if RULES[finding.code].buffers_only for name in finding.subjects}
    for finding in new if known else ():
        for name in finding.subjects if RULES[finding.code].buffers_only else ():
            if name not in known:
                more.setdefault(name, step)


def add_later_buffers(finding: Finding, more: Mapping[str, int]) -> Finding:
    """Add evidence to a finding on buffers: the buffers in `more` differ later, too."""
    names = [name for name in more if RULES[finding.code].buffers_only and name not in finding.subjects]
    if not names:
        return finding
    first, differ = min(more[name] for name in names), plural_verb("differs", "differ", names)
    return replace(finding, evidence=(*finding.evidence, f"after step {first}, {join_names(names)} {differ} too"))


def _judge_step(wrapper: WrapperTrace, step: int, reports: Mapping[int, Sequence[RankReport]]) -> list[Finding]:
    """Judge the reports of one step; a rank that reported nothing has all gradients."""
    findings = []
    ended = {rank.started.rank: rank.counts[wrapper.number][0] > step for rank in wrapper.ranks}
    nothing_missing = {number: RankReport(StepEvidence(number, step, {})) for number in ended if ended[number]}
    for turn in range(max(map(len, reports.values()))):
        by_rank = nothing_missing | {number: items[turn] for number, items in reports.items() if turn < len(items)}
        rank_reports = [by_rank[number] for number in ended if number in by_rank]
        findings += judge_reports(rank_reports, wrapper.made.context, settled=False)  # the closing reports are settled
    return findings
