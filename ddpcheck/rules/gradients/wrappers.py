"""Judges of the wrappers of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePath

from ddpcheck.findings.evidence.loop import GradientsHooked, ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.evidence.steps import StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity, select_findings
from ddpcheck.findings.source_lines import assignment_in_classes, last_assignment
from ddpcheck.findings.wording import group_by, join_names, plural_verb
from ddpcheck.rules.causes import ReportedCauses
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_meshes
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import judge_hooked
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import locate_condition
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_scaled_by_hooks
from ddpcheck.rules.loss.losses import are_for_sums
from ddpcheck.rules.loss.target_weights import severity_of_targets
from ddpcheck.rules.replicas.changes import judge_replaced, locate_change
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_values_before_sharding, locate_seed
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_apart
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_ignored
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_local_writes
from ddpcheck.rules.replicas.descriptions import COUNTED, judge_constructions
from ddpcheck.rules.replicas.watched_steps import (
    against_average,
    judge_captured,
    judge_reports,
    without_alike_later,
    without_rounding,
)
from ddpcheck.stream.entries import BuffersKept, ReplicaCaptured, StepsReported, TrainedApart
from ddpcheck.stream.rank_report import RankReport
from ddpcheck.trace.replicas import judge_options
from ddpcheck.trace.script_facts import ScriptFacts, WatchedWrapper, first_steps
from ddpcheck.trace.unwrapped_params import gradients_agree, gradients_differ

_FEWEST_AGREE = 2  # optimizer steps with the same nonzero gradient on all ranks


def judge_begun(facts: ScriptFacts) -> list[Finding]:
    """Return findings on modules about to be wrapped, each at the line to edit."""
    findings = []
    for finding in judge_constructions(facts.of(WrapperBegun)):
        if COUNTED in finding.tags and finding.location is not None:
            variable = finding.tags[finding.tags.index(COUNTED) + 1]
            finding = replace(
                finding, location=facts.source.ask(last_assignment, finding.location, variable) or finding.location
            )
        findings.append(finding)
    return findings


def judge_wrappers(facts: ScriptFacts) -> list[Finding]:
    """Return findings on every wrapper, over all steps."""
    all_findings = []
    for wrapper in facts.wrappers:
        findings = _judge_wrapper(facts, wrapper)
        if facts.averages_by_hand(wrapper.number):
            findings = [finding for finding in findings if finding.code not in ("DDP301", "DDP501", "DDP502")]
        if sums_rightly(wrapper):
            findings = [finding for finding in findings if finding.code != "DDP303"]
        if wrapper.made.by_library:  # its options are not set by the script
            findings = [finding for finding in findings if finding.severity is not Severity.NOTE]
        if len(facts.wrappers) > 1:
            info = wrapper.made
            note = f"in the {info.module} that is wrapped{f' at {info.location}' if info.location else ''}"
            findings = [replace(finding, evidence=(*finding.evidence, note)) for finding in findings]
        all_findings += findings
    for wrappers in group_by(facts.wrappers, lambda wrapper: wrapper.number).values():
        all_findings += [] if facts.model_groups else judge_meshes(wrappers, facts.world_size)
    return all_findings


def sums_rightly(wrapper: WatchedWrapper) -> bool:
    """Return True if a wrapper sums gradients and the loss is scaled for sums.

    An unknown loss (e.g. compiled) counts as scaled for sums if a call of the script sets the factor.
    """
    captured = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda replica: replica.step).values()
    complete = [replicas for replicas in captured if len(replicas) == len(wrapper.ranks)]
    checks = [check for replicas in complete for rank_checks in against_average(replicas) for check in rank_checks]
    wrong, size = [check for check in checks if check.bad], len(wrapper.ranks)
    if not wrong or any(abs(check.ratio - size) + check.residual > check.tolerance * size for check in wrong):
        return False
    if any(loss.terms for losses in wrapper.losses for loss in losses):
        return are_for_sums(wrapper.losses, wrapper.number)
    return any(change.what == "scale" for changes in wrapper.of(ModuleChanged) for change in changes)


def _judge_wrapper(facts: ScriptFacts, wrapper: WatchedWrapper) -> list[Finding]:
    info = wrapper.made

    def locate(finding: Finding) -> Finding:
        if finding.location or not finding.subjects:
            return finding
        line = wrapper.loss_line if finding.subjects == ("loss",) else None
        if finding.code == "DDP306":
            line = _step_of(facts, f"{wrapper.number}/{finding.subjects[0]}")
        made_at = line or facts.source.ask(assignment_in_classes, info.classes, finding.subjects[0])
        return replace(finding, location=made_at or info.location)

    reported = ReportedCauses()
    more_buffers: dict[str, int] = {}
    reports: dict[int, dict[int, list[RankReport]]] = {}
    closing: list[RankReport] = []
    solo_reports: list[RankReport] = []
    for rank, entries in zip(wrapper.ranks, wrapper.of(StepsReported), strict=True):
        for entry in entries:
            if entry.closing:
                closing.append(entry.report)
            elif entry.alone:
                solo_reports.append(entry.report)
            elif not entry.begun or rank.counts[wrapper.number][1] <= entry.report.step:
                reports.setdefault(entry.report.step, {}).setdefault(rank.started.rank, []).append(entry.report)
    captured = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda replica: replica.step)
    kept_buffers = group_by(chain.from_iterable(wrapper.of(BuffersKept)), lambda event: event.step)
    if not wrapper.missing and (built := wrapper.values_built):
        reported.add(select_findings(judge_values_before_sharding(built, {})), locate)
        reported.add(judge_options("DDP221", wrapper.policies, "What fully_shard was given"), locate)
    for step in () if wrapper.missing else sorted(reports.keys() | captured.keys()):
        step_findings = _judge_step(wrapper, step, reports[step]) if step in reports else []
        if len(captured.get(step, ())) == len(wrapper.ranks):
            buffers = [event.buffers for event in kept_buffers.get(step, ())]
            replicas = without_alike_later(without_rounding(captured[step]), buffers)
            step_findings += judge_captured(info, step, replicas, first=step == min(captured))
        reported.add(select_findings(step_findings), locate)
        note_more_buffers(more_buffers, reported.findings, step_findings, step)
    if not wrapper.missing and len(closing) == len(wrapper.ranks):
        reported.add(select_findings(judge_reports(closing, info.context, settled=True)), locate)
    if not wrapper.missing:
        reported.add(select_findings(judge_apart(wrapper.of(TrainedApart))), locate)
    for report in solo_reports:
        reported.add(select_findings(judge_reports([report], info.context, settled=False)), locate)
    moved = {
        name
        for replica in chain.from_iterable(captured.values())
        for name, gradient in replica.state.values.gradients.items()
        if gradient
    }
    kept = [f for f in reported.findings if f.code != "DDP107" or moved.isdisjoint(f.subjects)]
    severity = _severity_of_means(wrapper, reports)
    kept = [replace(f, severity=severity) if f.code == "DDP305" else f for f in kept]
    kept = [with_buffers(f, more_buffers) for f in kept]
    kept = [f for f in kept if f.code != "DDP503" or not _averaged_by_hand(facts, wrapper.number, f)]
    kept = [_at_the_load(f, facts.of(FileUsed), info.location) if f.code == "DDP521" else f for f in kept]
    changes = wrapper.of(ModuleChanged)
    by_hand = [*judge_ignored(changes), *judge_replaced(changes)]
    if not wrapper.missing:
        everywhere = [step for step, group in captured.items() if len(group) == len(wrapper.ranks)]
        by_hand += judge_hooked(wrapper.of(GradientsHooked), everywhere)
        if not are_for_sums(wrapper.losses, wrapper.number):
            by_hand += judge_scaled_by_hooks(wrapper.of(GradientsHooked), everywhere, moved)
    shards = {replica.shard for replica in chain.from_iterable(captured.values())}
    if not wrapper.missing and info.context.sharded is not None and len(shards) == len(info.ranks) > 1:
        by_hand += judge_local_writes(changes, wrapper.values_built)
    consequences = [f for f in reported.consequences.values() if f.code != "DDP107"]
    located = (locate_condition(f, facts) for f in (*kept, *consequences))
    first = [step for rank in wrapper.ranks for step in first_steps(rank)[:1]]
    return [*by_hand, *(locate_seed(locate_change(f, changes, info.location), first) for f in located)]


def _step_of(facts: ScriptFacts, name: str) -> Location | None:
    """Return the line of the optimizer step of a parameter."""
    return next(
        (opt.steps[0][0].location for opt in facts.optimizers if opt.steps and name in opt.steps[0][0].held), None
    )


def _averaged_by_hand(facts: ScriptFacts, wrapper: int, finding: Finding) -> bool:
    """Return True if parameters outside of the wrapper get equal gradients on all ranks."""
    for name in (f"{wrapper}/{subject}" for subject in finding.subjects):
        steps = [rank_steps for opt in facts.optimizers for rank_steps in opt.steps if name in rank_steps[0].alone]
        agree = sum(gradients_agree(rank_steps, name) for rank_steps in steps)
        if agree < _FEWEST_AGREE or any(gradients_differ(rank_steps, name) for rank_steps in steps):
            return False
    return True


def note_more_buffers(more: dict[str, int], reported: Sequence[Finding], new: Sequence[Finding], step: int) -> None:
    """Add to `more` buffers that differ from `step` on, after other buffers were reported."""
    known = {name for finding in reported if finding.code in _OF_BUFFERS for name in finding.subjects}
    for finding in new if known else ():
        for name in finding.subjects if finding.code in _OF_BUFFERS else ():
            if name not in known:
                more.setdefault(name, step)


def with_buffers(finding: Finding, more: Mapping[str, int]) -> Finding:
    """Add buffers that differ since a later step to a finding on buffers."""
    names = [name for name in more if finding.code in _OF_BUFFERS and name not in finding.subjects]
    if not names:
        return finding
    first, differ = min(more[name] for name in names), plural_verb("differs", "differ", names)
    return replace(finding, evidence=(*finding.evidence, f"after step {first}, {join_names(names)} {differ} too"))


_OF_BUFFERS = ("DDP214", "DDP215")


def _at_the_load(finding: Finding, uses: Sequence[Sequence[FileUsed]], wrapped_at: Location | None) -> Finding:
    """Move a finding to the line that loads one file on all ranks."""
    read = [{(use.path, use.location) for use in rank_uses if use.by_torch and not use.writes} for rank_uses in uses]
    alike = set.intersection(*read)
    if len({line for _, line in alike}) != 1:
        drawn_alike = (
            "Initialise the parameters before fully_shard; or draw each whole parameter under one seed and take the "
            "rank's shard of it: distribute_tensor(values, parameter.device_mesh, parameter.placements). To draw only "
            "the shard, give each rank a different seed."
        )
        return replace(finding, location=wrapped_at, fix="" if any(read) else drawn_alike)
    path, line = min(alike, key=str)
    note = f"every rank has loaded {PurePath(path).name} there"
    return replace(finding, location=line, evidence=(note, *finding.evidence))


def _severity_of_means(wrapper: WatchedWrapper, reports: Mapping[int, Mapping[int, Sequence[RankReport]]]) -> Severity:
    """Return the DDP305 severity from all measured steps."""
    by_rank = [
        [report for step in reports.values() for report in step.get(rank.started.rank, ())] for rank in wrapper.ranks
    ]
    return severity_of_targets([[batch for report in history for batch in report.micro_batches] for history in by_rank])


def _judge_step(wrapper: WatchedWrapper, step: int, reports: Mapping[int, Sequence[RankReport]]) -> list[Finding]:
    """Judge the reports of one step; no report means nothing is missing."""
    findings = []
    for turn in range(max(map(len, reports.values()))):
        rank_reports = []
        for rank in wrapper.ranks:
            number = rank.started.rank
            if turn < len(reports.get(number, ())):
                rank_reports.append(reports[number][turn])
            elif rank.counts[wrapper.number][0] > step:
                rank_reports.append(RankReport(StepEvidence(number, step, {})))
        findings += judge_reports(rank_reports, wrapper.made.context, settled=False)  # the closing reports are settled
    return findings


def are_rounded(wrapper: WatchedWrapper) -> bool:
    """Return True if parameters differ by rounding in any step; see `without_rounding`."""
    by_step = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda replica: replica.step)
    complete = [replicas for replicas in by_step.values() if len(replicas) == len(wrapper.ranks)]
    return any(without_rounding(replicas) != replicas for replicas in complete)
