"""Findings from the logs of all ranks of a script: what a watch would have found, had the ranks asked each other.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import TypeVar

from ddpcheck.findings.evidence.changes import ModuleChanged
from ddpcheck.findings.evidence.construction import WrapperBegun
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.parameters import StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.source_lines import assignment_in_classes, last_assignment
from ddpcheck.findings.wording import counted
from ddpcheck.judge.causes import find_causes
from ddpcheck.judge.script_changes import at_the_change
from ddpcheck.judge.wrapper_construction import COUNTED, judge_constructions
from ddpcheck.monitor.judging import judge_replica_states, judge_reports
from ddpcheck.monitor.loss_normalisation import severity_of_targets
from ddpcheck.monitor.options import WatchOptions
from ddpcheck.monitor.reporting import FindingReporter
from ddpcheck.monitor.script.reporting.program_judging import (
    averages_by_hand,
    judge_held_states,
    judge_program,
    loss_line,
    sums_over_ranks,
)
from ddpcheck.stream.entries import ReplicaCaptured, StepsReported, WrapperMade
from ddpcheck.stream.rank_report import RankReport
from ddpcheck.stream.watched_rank import WatchedRank

_REPLICAS_PART = {"DDP208", "DDP301", "DDP306", "DDP501", "DDP502", "DDP503", "DDP504", "DDP508", "DDP515", "DDP518"}
_Kind = TypeVar("_Kind")
_TOLERANCE = 1e-3  # of a sketch in float32, whose sums of many elements are rounded


@dataclass(frozen=True, slots=True)
class WatchedWrapper:
    """One wrapper on the ranks of its group, each of which constructed it as its `number`-th.

    Attributes:
        number: Counted from 0.
        made: Its construction on the first of these ranks.
        ranks: Those that have left a log.
    """

    number: int
    made: WrapperMade
    ranks: Sequence[WatchedRank]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of its group have left a log here, and none is on another machine."""
        return not self.missing

    @property
    def missing(self) -> set[int]:
        """The ranks of its group that have left no log here."""
        return {*self.made.ranks} - {rank.started.rank for rank in self.ranks}

    @property
    def steps(self) -> int:
        """How many have ended on each rank."""
        return min(rank.counts[self.number][1] for rank in self.ranks)

    def entries(self, kind: type[_Kind]) -> Iterator[tuple[int, _Kind]]:
        """The entries of a kind, each with its rank."""
        for rank in self.ranks:
            for entry in rank.entries:
                if isinstance(entry, kind) and getattr(entry, "wrapper", None) == self.number:
                    yield rank.started.rank, entry


def watched_wrappers(ranks: Sequence[WatchedRank]) -> list[WatchedWrapper]:
    """The wrappers that the ranks have constructed, in their order."""
    groups: dict[tuple[int, tuple[int, ...]], list[WatchedRank]] = {}
    for rank in ranks:
        for number, made in enumerate(rank.wrappers):
            groups.setdefault((number, made.ranks), []).append(rank)
    return [WatchedWrapper(key[0], group[0].wrappers[key[0]], group) for key, group in sorted(groups.items())]


def judge_logs(ranks: Sequence[WatchedRank], *, ended: bool) -> list[Finding]:
    """The findings on the script and on all wrappers, causes only; `ended`: every rank came to its end."""
    wrappers = watched_wrappers(ranks)
    found = []
    for wrapper in wrappers:
        findings = _judge_wrapper(wrapper)
        if averages_by_hand(ranks, wrapper.number):
            findings = [finding for finding in findings if finding.code != "DDP501"]
        if sums_over_ranks(wrapper.ranks, wrapper.number):  # of which a hook sums the gradients, and rightly
            findings = [finding for finding in findings if finding.code != "DDP303"]
        if wrapper.made.by_library:  # advice on its options is for somebody else than who wrote the script
            findings = [finding for finding in findings if finding.severity is not Severity.NOTE]
        if len(wrappers) > 1:
            made = wrapper.made
            where = f"in the {made.module} that is wrapped{f' at {made.location}' if made.location else ''}"
            findings = [replace(finding, evidence=(*finding.evidence, where)) for finding in findings]
        found += findings
    found = [*judge_begun(ranks), *found]
    around = judge_program(ranks, ended=ended)
    if any(finding.code == "DDP306" for finding in around):  # of the optimizers' state, which the parameters follow
        found = [finding for finding in found if finding.code != "DDP306"]
    if any(finding.code in ("DDP305", "DDP514") for finding in found):  # of targets, which say more than sums do
        around = [finding for finding in around if finding.code not in ("DDP305", "DDP514")]
    if any(finding.code == "DDP301" for finding in found):  # so they were when backward ended, and not changed later
        around = [finding for finding in around if finding.code != "DDP301"]
    if not any(finding.code in _REPLICAS_PART for finding in (*around, *found)):
        around += judge_held_states(ranks)
    return find_causes([*around, *found]).findings


def judge_begun(ranks: Sequence[WatchedRank]) -> list[Finding]:
    """The findings on what the ranks were about to wrap, each at the line that a user edits."""
    if len(ranks) < 2 or [rank.started.rank for rank in ranks] != list(range(ranks[0].started.world_size)):
        return []
    begun = [[entry for entry in rank.entries if isinstance(entry, WrapperBegun)] for rank in ranks]
    found = []
    for finding in judge_constructions(begun):
        if COUNTED in finding.tags and finding.location is not None:
            variable = finding.tags[finding.tags.index(COUNTED) + 1]
            finding = replace(finding, location=last_assignment(finding.location, variable) or finding.location)
        found.append(finding)
    return found


def _judge_wrapper(wrapper: WatchedWrapper) -> list[Finding]:
    made = wrapper.made

    def locate(finding: Finding) -> Finding:
        if finding.location or not finding.subjects:
            return finding
        of_loss = loss_line(wrapper.ranks, wrapper.number) if finding.subjects == ("loss",) else None
        made_at = of_loss or assignment_in_classes(made.classes, finding.subjects[0])
        return replace(finding, location=made_at or made.location)

    options = WatchOptions(on_finding=lambda _: None)
    reporter = FindingReporter(options, shows_warnings=False, locate=locate)
    reports: dict[int, dict[int, list[RankReport]]] = {}
    closing: dict[int, RankReport] = {}
    alone: list[RankReport] = []
    for rank, entry in wrapper.entries(StepsReported):
        if entry.closing:
            closing[rank] = entry.report
        elif entry.alone:
            alone.append(entry.report)
        else:
            reports.setdefault(entry.report.step, {}).setdefault(rank, []).append(entry.report)
    captured: dict[int, dict[int, ReplicaCaptured]] = {}
    for rank, one in wrapper.entries(ReplicaCaptured):
        captured.setdefault(one.step, {})[rank] = one
    for step in sorted(reports.keys() | captured.keys()) if wrapper.is_whole else ():
        found = []
        if step in reports:
            found += _judge_step(wrapper, step, reports[step])
        if len(captured.get(step, {})) == len(wrapper.ranks):
            found += _judge_replicas(made, step, captured[step], first=step == min(captured))
        reporter.report(found)
    if wrapper.is_whole and len(closing) == len(wrapper.ranks):
        reporter.report(judge_reports([closing[rank] for rank in sorted(closing)], made.context, settled=True))
    for report in alone:
        reporter.report(judge_reports([report], made.context, settled=False))
    moved = {
        name
        for of_ranks in captured.values()
        for one in of_ranks.values()
        for name, gradient in one.state.values.gradients.items()
        if gradient
    }
    changes = [
        [one for one in rank.entries if isinstance(one, ModuleChanged) and one.wrapper == wrapper.number]
        for rank in wrapper.ranks
    ]
    kept = [one for one in reporter.findings if one.code != "DDP107" or moved.isdisjoint(one.subjects)]
    severity = _severity_of_means(wrapper, reports)
    kept = [replace(one, severity=severity) if one.code == "DDP305" else one for one in kept]
    return [at_the_change(one, changes, made.location) for one in kept]


def _severity_of_means(wrapper: WatchedWrapper, reports: Mapping[int, Mapping[int, Sequence[RankReport]]]) -> Severity:
    """By all steps that were measured, where a watch has only those until the finding."""
    by_rank = [
        [report for step in reports.values() for report in step.get(rank.started.rank, ())] for rank in wrapper.ranks
    ]
    return severity_of_targets([[one for report in of_rank for one in report.micro_batches] for of_rank in by_rank])


def _judge_step(wrapper: WatchedWrapper, step: int, reports: Mapping[int, Sequence[RankReport]]) -> list[Finding]:
    """Findings on the reports of one step; a rank that began its backward pass and reports nothing has all of it."""
    found = []
    for turn in range(max(map(len, reports.values()))):
        theirs = []
        for rank in wrapper.ranks:
            number = rank.started.rank
            if turn < len(reports.get(number, ())):
                theirs.append(reports[number][turn])
            elif rank.counts[wrapper.number][0] > step:
                theirs.append(RankReport(StepEvidence(number, step, {})))
        found += judge_reports(theirs, wrapper.made.context, settled=False)  # which all steps to the end say
    return found


def _judge_replicas(
    made: WrapperMade, step: int, captured: Mapping[int, ReplicaCaptured], *, first: bool
) -> list[Finding]:
    everyone = [captured[rank] for rank in sorted(captured)]
    states = [one.state for one in everyone]
    differences = _differences(everyone)
    alike = len({repr(replace(state, values=replace(state.values, rank=0))) for state in states}) == 1
    if alike and not any(difference.bad for theirs in differences for difference in theirs):
        return []
    states = [
        replace(state, values=replace(state.values, against_local=tuple(theirs)))
        for state, theirs in zip(states, differences, strict=True)
    ]
    hook = next((one for one in everyone if one.own_hook), everyone[0])
    wrapper = replace(made.context.wrapper, comm_hook=hook.hook)
    context = replace(made.context, wrapper=wrapper, own_hook=hook.own_hook)
    found = judge_replica_states(states, context, step, after_backward=True, first=first)
    return [one if first or one.code != "DDP222" else replace(one, steps=(step,)) for one in found]


def _differences(everyone: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """By rank, how far what the wrapper left is from the average of the ranks' own gradients, by their sketches."""
    names = list(dict.fromkeys(name for one in everyone for name in one.own))
    owns = {name: [one.own[name] for one in everyone if name in one.own] for name in names}
    scales = {name: math.hypot(*chain.from_iterable(owns[name])) / math.sqrt(len(everyone)) for name in names}
    wanted = {name: [sum(numbers) / len(everyone) for numbers in zip(*owns[name], strict=True)] for name in names}
    found: list[list[Difference]] = []
    for one in everyone:
        same = (
            theirs
            for other, theirs in zip(everyone, found, strict=False)
            if (other.averaged, other.eps, other.hook) == (one.averaged, one.eps, one.hook)
        )
        theirs = next(same, None)
        found.append(_differences_of(one, wanted, scales, len(everyone)) if theirs is None else theirs)
    return found


def _differences_of(
    one: ReplicaCaptured, wanted: Mapping[str, Sequence[float]], scales: Mapping[str, float], world_size: int
) -> list[Difference]:
    found = []
    for name, want in wanted.items():
        scale = scales[name]
        if one.hook:  # which may round away what is itself rounding: the gradient of a bias before a BatchNorm
            scale = max(value for n, value in scales.items() if n.rpartition(".")[0] == name.rpartition(".")[0])
        got = one.averaged.get(name) or [0.0] * len(want)
        if not all(map(math.isfinite, (*want, *got))):
            return []  # an overflow, which a gradient scaler skips
        tolerance = max(_TOLERANCE, (8 + world_size) * one.eps.get(name, 0.0))
        delta, norm = math.dist(got, want), math.hypot(*want)
        ratio = sum(map(mul, got, want)) / power if (power := norm * norm) else 0.0
        residual = math.dist(got, [ratio * number for number in want])
        found.append(
            Difference(
                name,
                delta / scale if scale else float(delta > 0.0),
                tolerance,
                ratio=ratio,
                residual=residual / scale if scale else 0.0,
                elements=len(want),
                absolute_error=delta,
                reference_norm=norm,
            )
        )
    return found


def describe_wrappers(wrappers: Sequence[WatchedWrapper]) -> str:
    """The wrappers with their steps, in words."""
    said = Counter(f"{wrapper.made.module} ({counted(wrapper.steps, 'step')})" for wrapper in wrappers)
    return ", ".join(f"{times} times {one}" if times > 1 else one for one, times in said.items())
