"""Findings on the wrappers of a script, from the logs of all ranks.

Judges parameters, replicas, the reducer and the loop step by step after the run, as a watch does during the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePath

from ddpcheck.findings.evidence.loop import GradientsHooked, ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.evidence.steps import StepEvidence
from ddpcheck.findings.program_blocks import blocks_of_lines
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity, select_findings
from ddpcheck.findings.source_lines import assignment_in_classes, last_assignment
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, join_names, one_finding, plural_verb
from ddpcheck.judge.causes import ReportedCauses
from ddpcheck.judge.gradients.script_alone import gradients_agree, gradients_differ
from ddpcheck.judge.gradients.script_clips import judge_hooked, judge_scaled_by_hooks
from ddpcheck.judge.gradients.script_losses import are_for_sums
from ddpcheck.judge.gradients.target_weights import severity_of_targets
from ddpcheck.judge.loop.training_loop import BY_FLAG
from ddpcheck.judge.loop.watched_steps import judge_reports
from ddpcheck.judge.replicas.descriptions import differing_names, judge_options, judge_values_before_sharding
from ddpcheck.judge.replicas.replica_state import AVERAGE_THEM, never_averaged
from ddpcheck.judge.replicas.script_changes import (
    at_the_change,
    at_the_seed,
    judge_ignored,
    judge_replaced,
    judge_written_alone,
)
from ddpcheck.judge.replicas.script_replicas import (
    against_average,
    judge_captured,
    without_alike_later,
    without_rounding,
)
from ddpcheck.judge.replicas.wrapper_construction import COUNTED, judge_constructions
from ddpcheck.judge.script_facts import ScriptFacts, WatchedWrapper, entries_of, first_steps
from ddpcheck.stream.entries import (
    BuffersKept,
    PeerReceived,
    ReplicaCaptured,
    StepsReported,
    TrainedApart,
)
from ddpcheck.stream.rank_report import RankReport

_FEWEST_AGREE = 2  # optimizer steps with the same nonzero gradient on all ranks
_FEWEST_MARKS = 3  # of ranks that train separately: at the beginning, and after two steps


def judge_begun(facts: ScriptFacts) -> list[Finding]:
    """Return findings on modules about to be wrapped, each at the line to edit."""
    found = []
    for finding in judge_constructions(facts.of(WrapperBegun)):
        if COUNTED in finding.tags and finding.location is not None:
            variable = finding.tags[finding.tags.index(COUNTED) + 1]
            finding = replace(
                finding, location=facts.source.ask(last_assignment, finding.location, variable) or finding.location
            )
        found.append(finding)
    return found


def judge_wrappers(facts: ScriptFacts) -> list[Finding]:
    """Return findings on every wrapper, over all steps."""
    found = []
    for wrapper in facts.wrappers:
        findings = _judge_wrapper(facts, wrapper)
        if facts.averages_by_hand(wrapper.number):
            findings = [finding for finding in findings if finding.code not in ("DDP301", "DDP501", "DDP502")]
        if sums_rightly(wrapper):
            findings = [finding for finding in findings if finding.code != "DDP303"]
        if wrapper.made.by_library:  # its options are not set by the script
            findings = [finding for finding in findings if finding.severity is not Severity.NOTE]
        if len(facts.wrappers) > 1:
            made = wrapper.made
            where = f"in the {made.module} that is wrapped{f' at {made.location}' if made.location else ''}"
            findings = [replace(finding, evidence=(*finding.evidence, where)) for finding in findings]
        found += findings
    for same in group_by(facts.wrappers, lambda wrapper: wrapper.number).values():
        found += [] if facts.model_groups else judge_meshes(same, facts.world_size)
    return found


def sums_rightly(wrapper: WatchedWrapper) -> bool:
    """Return True if a wrapper sums gradients and the loss is scaled for sums.

    An unknown loss (e.g. compiled) counts as scaled for sums if a call of the script sets the factor.
    """
    captured = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda one: one.step).values()
    complete = [everyone for everyone in captured if len(everyone) == len(wrapper.ranks)]
    every = [one for everyone in complete for of_rank in against_average(everyone) for one in of_rank]
    wrong, size = [one for one in every if one.bad], len(wrapper.ranks)
    if not wrong or any(abs(one.ratio - size) + one.residual > one.tolerance * size for one in wrong):
        return False
    if any(one.terms for of_rank in wrapper.losses for one in of_rank):
        return are_for_sums(wrapper.losses, wrapper.number)
    return any(one.what == "scale" for of_rank in wrapper.of(ModuleChanged) for one in of_rank)


def judge_meshes(same: Sequence[WatchedWrapper], world_size: int) -> list[Finding]:
    """DDP301: groups of ranks that shard the same model on separate meshes and diverge.

    A warning: some scripts train several models from one start on purpose. Ranks that send tensors to each other are
    skipped as pipeline stages. `same`: one model of a script, by group of ranks.
    """
    ranks = [wrapper.made.ranks for wrapper in same]
    if any(entries_of(rank, PeerReceived) for wrapper in same for rank in wrapper.ranks):
        return []
    if len(same) < 2 or any(one.made.context.sharded is None for one in same) or sum(map(len, ranks)) < world_size:
        return []
    captured = [chain.from_iterable(wrapper.of(ReplicaCaptured)) for wrapper in same]
    by_step: dict[int, list[list[ReplicaCaptured]]] = {}
    for group, of_group in enumerate(captured):
        for one in of_group:
            if one.shard >= 0:
                by_step.setdefault(one.step, [[] for _ in same])[group].append(one)
    complete = {step: groups for step, groups in by_step.items() if [*map(len, groups)] == [*map(len, ranks)]}
    return judge_apart_meshes(ranks, complete, same[0].made.location)


def judge_apart_meshes(
    ranks: Sequence[Sequence[int]], by_step: Mapping[int, Sequence[Sequence[ReplicaCaptured]]], made: Location | None
) -> list[Finding]:
    """DDP301: parameters that diverge between meshes; `ranks` and captures by mesh."""
    if len(by_step) < 2 or _shards_that_differ(by_step[min(by_step)]):
        return []
    apart = _shards_that_differ(by_step[max(by_step)])
    first = by_step[min(by_step)][0][0].state.values.parameters
    if apart < first.keys() or not apart:
        return []
    groups = join_names([format_ranks(one) for one in ranks])
    return one_finding(
        "DDP301",
        ("mesh",),
        f"{capitalized(groups)} have separate meshes: they begin with the same model and diverge, because "
        "nothing averages gradients between them.",
        severity=Severity.WARNING,
        location=made,
        evidence=[f"all parameters were equal before step {min(by_step)}, and different before step {max(by_step)}"],
        fix="Give fully_shard a mesh of all ranks: of one dimension, or of two, the first of which replicates "
        '(init_device_mesh(..., mesh_dim_names=("replicate", "shard"))).',
    )


def _shards_that_differ(groups: Sequence[Sequence[ReplicaCaptured]]) -> set[str]:
    """Return the parameters with mismatched values in the same shard of different groups."""
    by_shard = group_by(chain.from_iterable(groups), lambda one: one.shard).values()
    values = ([one.state.values.parameters for one in replicas] for replicas in by_shard)
    return set(chain.from_iterable(map(differing_names, values)))


def _judge_wrapper(facts: ScriptFacts, wrapper: WatchedWrapper) -> list[Finding]:
    made = wrapper.made

    def locate(finding: Finding) -> Finding:
        if finding.location or not finding.subjects:
            return finding
        line = wrapper.loss_line if finding.subjects == ("loss",) else None
        if finding.code == "DDP306":
            line = _step_of(facts, f"{wrapper.number}/{finding.subjects[0]}")
        made_at = line or facts.source.ask(assignment_in_classes, made.classes, finding.subjects[0])
        return replace(finding, location=made_at or made.location)

    reported = ReportedCauses()
    more_buffers: dict[str, int] = {}
    reports: dict[int, dict[int, list[RankReport]]] = {}
    closing: list[RankReport] = []
    alone: list[RankReport] = []
    for rank, entries in zip(wrapper.ranks, wrapper.of(StepsReported), strict=True):
        for entry in entries:
            if entry.closing:
                closing.append(entry.report)
            elif entry.alone:
                alone.append(entry.report)
            elif not entry.begun or rank.counts[wrapper.number][1] <= entry.report.step:
                reports.setdefault(entry.report.step, {}).setdefault(rank.started.rank, []).append(entry.report)
    captured = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda one: one.step)
    kept_buffers = group_by(chain.from_iterable(wrapper.of(BuffersKept)), lambda one: one.step)
    if not wrapper.missing and (built := wrapper.values_built):
        reported.add(select_findings(judge_values_before_sharding(built, {})), locate)
        reported.add(judge_options("DDP221", wrapper.policies, "What fully_shard was given"), locate)
    for step in () if wrapper.missing else sorted(reports.keys() | captured.keys()):
        found = _judge_step(wrapper, step, reports[step]) if step in reports else []
        if len(captured.get(step, ())) == len(wrapper.ranks):
            buffers = [one.buffers for one in kept_buffers.get(step, ())]
            everyone = without_alike_later(without_rounding(captured[step]), buffers)
            found += judge_captured(made, step, everyone, first=step == min(captured))
        reported.add(select_findings(found), locate)
        note_more_buffers(more_buffers, reported.findings, found, step)
    if not wrapper.missing and len(closing) == len(wrapper.ranks):
        reported.add(select_findings(judge_reports(closing, made.context, settled=True)), locate)
    if not wrapper.missing:
        reported.add(select_findings(judge_apart(wrapper.of(TrainedApart))), locate)
    for report in alone:
        reported.add(select_findings(judge_reports([report], made.context, settled=False)), locate)
    moved = {
        name
        for one in chain.from_iterable(captured.values())
        for name, gradient in one.state.values.gradients.items()
        if gradient
    }
    kept = [one for one in reported.findings if one.code != "DDP107" or moved.isdisjoint(one.subjects)]
    severity = _severity_of_means(wrapper, reports)
    kept = [replace(one, severity=severity) if one.code == "DDP305" else one for one in kept]
    kept = [with_buffers(one, more_buffers) for one in kept]
    kept = [one for one in kept if one.code != "DDP503" or not _averaged_by_hand(facts, wrapper.number, one)]
    kept = [_at_the_load(one, facts.of(FileUsed), made.location) if one.code == "DDP521" else one for one in kept]
    changes = wrapper.of(ModuleChanged)
    by_hand = [*judge_ignored(changes), *judge_replaced(changes)]
    if not wrapper.missing:
        everywhere = [step for step, of_ranks in captured.items() if len(of_ranks) == len(wrapper.ranks)]
        by_hand += judge_hooked(wrapper.of(GradientsHooked), everywhere)
        if not are_for_sums(wrapper.losses, wrapper.number):
            by_hand += judge_scaled_by_hooks(wrapper.of(GradientsHooked), everywhere, moved)
    shards = {one.shard for one in chain.from_iterable(captured.values())}
    if not wrapper.missing and made.context.sharded is not None and len(shards) == len(made.ranks) > 1:
        by_hand += judge_written_alone(changes, wrapper.values_built)
    consequences = [one for one in reported.consequences.values() if one.code != "DDP107"]
    located = (_at_condition(one, facts) for one in (*kept, *consequences))
    first = [step for rank in wrapper.ranks for step in first_steps(rank)[:1]]
    return [*by_hand, *(at_the_seed(at_the_change(one, changes, made.location), first) for one in located)]


def _at_condition(finding: Finding, facts: ScriptFacts) -> Finding:
    """Move a DDP502 to the innermost `if` around `no_sync`, if no loop is inside."""
    line = str(finding.location or "")
    enters = finding.subjects == ("no_sync",) and BY_FLAG not in finding.evidence  # the value of a setting decides
    if finding.code != "DDP502" or finding.severity is not Severity.ERROR or not line or not enters:
        return finding
    around = [block for block in blocks_of_lines([line], source=facts.source)[line] if block.kind in _DECIDES]
    decides = bool(around) and around[-1].kind == "branch"
    return replace(finding, location=Location(around[-1].path, around[-1].line)) if decides else finding


_DECIDES = ("branch", "loop", "function")


def _step_of(facts: ScriptFacts, name: str) -> Location | None:
    """Return the line of the optimizer step of a parameter."""
    return next(
        (one.steps[0][0].location for one in facts.optimizers if one.steps and name in one.steps[0][0].held), None
    )


def _averaged_by_hand(facts: ScriptFacts, wrapper: int, finding: Finding) -> bool:
    """Return True if parameters outside of the wrapper get equal gradients on all ranks."""
    for name in (f"{wrapper}/{subject}" for subject in finding.subjects):
        steps = [of_ranks for one in facts.optimizers for of_ranks in one.steps if name in of_ranks[0].alone]
        agree = sum(gradients_agree(of_ranks, name) for of_ranks in steps)
        if agree < _FEWEST_AGREE or any(gradients_differ(of_ranks, name) for of_ranks in steps):
            return False
    return True


def note_more_buffers(more: dict[str, int], reported: Sequence[Finding], found: Sequence[Finding], step: int) -> None:
    """Add to `more` buffers that differ from `step` on, after other buffers were reported."""
    told = {name for one in reported if one.code in _OF_BUFFERS for name in one.subjects}
    for one in found if told else ():
        for name in one.subjects if one.code in _OF_BUFFERS else ():
            if name not in told:
                more.setdefault(name, step)


def with_buffers(finding: Finding, more: Mapping[str, int]) -> Finding:
    """Add buffers that differ since a later step to a finding on buffers."""
    names = [name for name in more if finding.code in _OF_BUFFERS and name not in finding.subjects]
    if not names:
        return finding
    first, differ = min(more[name] for name in names), plural_verb("differs", "differ", names)
    return replace(finding, evidence=(*finding.evidence, f"after step {first}, {join_names(names)} {differ} too"))


_OF_BUFFERS = ("DDP214", "DDP215")


def _at_the_load(finding: Finding, uses: Sequence[Sequence[FileUsed]], made: Location | None) -> Finding:
    """Move a finding to the line that loads one file on all ranks."""
    read = [{(use.path, use.location) for use in of_rank if use.by_torch and not use.writes} for of_rank in uses]
    alike = set.intersection(*read)
    if len({line for _, line in alike}) != 1:
        drawn_alike = (
            "Initialise the parameters before fully_shard; or draw each whole parameter under one seed and take the "
            "rank's shard of it: distribute_tensor(values, parameter.device_mesh, parameter.placements). To draw only "
            "the shard, give each rank a different seed."
        )
        return replace(finding, location=made, fix="" if any(read) else drawn_alike)
    path, line = min(alike, key=str)
    told = f"every rank has loaded {PurePath(path).name} there"
    return replace(finding, location=line, evidence=(told, *finding.evidence))


def judge_apart(apart: Sequence[Sequence[TrainedApart]]) -> list[Finding]:
    """DDP306: ranks that train separately (post-local SGD) and never average parameters."""
    last = [of_rank[-1] for of_rank in apart if of_rank]
    if len(last) < len(apart) or any(len(one.marks) < _FEWEST_MARKS for one in last):
        return []
    names = list(differing_names([one.parameters for one in last]))
    if not names or set.intersection(*(set(one.marks[1:]) for one in last)):
        return []
    count = min(len(one.marks) for one in last) - 1
    return one_finding("DDP306", names, never_averaged(names, count, last[0].step, last[0].hook), fix=AVERAGE_THEM)


def _severity_of_means(wrapper: WatchedWrapper, reports: Mapping[int, Mapping[int, Sequence[RankReport]]]) -> Severity:
    """Return the DDP305 severity from all measured steps."""
    by_rank = [
        [report for step in reports.values() for report in step.get(rank.started.rank, ())] for rank in wrapper.ranks
    ]
    return severity_of_targets([[one for report in of_rank for one in report.micro_batches] for of_rank in by_rank])


def _judge_step(wrapper: WatchedWrapper, step: int, reports: Mapping[int, Sequence[RankReport]]) -> list[Finding]:
    """Judge the reports of one step; no report means nothing is missing."""
    found = []
    for turn in range(max(map(len, reports.values()))):
        theirs = []
        for rank in wrapper.ranks:
            number = rank.started.rank
            if turn < len(reports.get(number, ())):
                theirs.append(reports[number][turn])
            elif rank.counts[wrapper.number][0] > step:
                theirs.append(RankReport(StepEvidence(number, step, {})))
        found += judge_reports(theirs, wrapper.made.context, settled=False)  # the closing reports are settled
    return found


def are_rounded(wrapper: WatchedWrapper) -> bool:
    """Return True if parameters differ by rounding in any step; see `without_rounding`."""
    by_step = group_by(chain.from_iterable(wrapper.of(ReplicaCaptured)), lambda one: one.step)
    complete = [everyone for everyone in by_step.values() if len(everyone) == len(wrapper.ranks)]
    return any(without_rounding(everyone) != everyone for everyone in complete)
