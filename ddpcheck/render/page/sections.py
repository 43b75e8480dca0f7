"""Template data of page sections: gradient plots, collectives, findings and modules."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpcheck.findings.figures import CalledCollective, CollectiveTimeline, ModuleEntry, RankCollectives, SourceExcerpt
from ddpcheck.findings.report import Finding, Location, ParityEntry, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_ranks, format_steps, group_by, join_names, plural
from ddpcheck.render.parts import facts_of, sorted_findings

_LEAST, _MOST_ERROR = 1e-12, 1e12  # limits of the scale
_REFERENCES = {
    "local": "Under DDP, against the average of the ranks' own gradients",
    "single-process": "The ranks' average, against the whole batch in a single process",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """Plot of each parameter's worst gradient error against one reference, worst errors first.

    `low` and `high` are the exponents (base 10) of the scale limits.
    """

    title: str
    summary: str
    entries: Sequence[ParityEntry]
    low: int
    high: int

    @property
    def ticks(self) -> range:
        """Exponents labelled on the scale."""
        return range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / 5)))

    def at(self, value: float) -> str:
        """Return the position in percent; zero is at the start, non-finite at the end."""
        if value == 0:
            return "0%"
        fraction = (math.log10(max(value, _LEAST)) - self.low) / (self.high - self.low) if math.isfinite(value) else 1.0
        return f"{2 + 96 * min(max(fraction, 0.0), 1.0):.1f}%"


def plots(parity: Iterable[ParityEntry]) -> list[Plot]:
    """Return a plot of gradient errors for each reference of the comparison."""
    groups = group_by(parity, lambda entry: entry.reference)
    return [_plot(reference, entries) for reference, entries in sorted(groups.items())]


def _plot(reference: str, entries: Sequence[ParityEntry]) -> Plot:
    by_name = group_by(entries, lambda entry: entry.parameter).values()
    worst_steps = (max(param_entries, key=lambda entry: (entry.is_beyond, entry.excess)) for param_entries in by_name)
    worst = sorted(worst_steps, key=lambda entry: (not entry.is_beyond, -entry.excess, entry.parameter))
    beyond = sum(entry.is_beyond for entry in worst)
    steps = plural(len({entry.step for entry in entries}), "step")
    summary = f"{plural(len(worst), 'parameter')} in {steps}: {beyond or 'none'} beyond the tolerance."
    values = [v for entry in worst for v in (entry.relative_error, entry.tolerance) if math.isfinite(v) and v > 0]
    least, most = (min(max(end, _LEAST), _MOST_ERROR) for end in (min(values, default=1e-8), max(values, default=1.0)))
    low = math.floor(math.log10(least))
    high = max(math.ceil(math.log10(most)), low + 2)
    return Plot(_REFERENCES.get(reference, f"Against {reference}"), summary, worst, low, high)


MOST_GROUPS = 6
_BEFORE = 4  # collectives shown before the ranks diverge
_MOST = 24  # collectives in one table
_MOST_DOING = 2  # distinct texts on how a group's ranks ended
_MOST_ENDS = 12


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that called the same collectives, and wait in the same call."""

    logs: Sequence[RankCollectives]
    listed: Sequence[CalledCollective]

    @property
    def log(self) -> RankCollectives:
        """Log of any rank of the group."""
        return self.logs[0]

    @property
    def name(self) -> str:
        """Ranks in words."""
        return format_ranks(log.rank for log in self.logs)

    @property
    def end(self) -> int:
        """Sequence number after the last listed call."""
        return self.log.first + len(self.log.calls)

    def at(self, number: int) -> CalledCollective | None:
        """Return the call with a sequence number; None if not listed."""
        index = number - self.log.first
        return self.listed[self.log.calls[index]] if 0 <= index < len(self.log.calls) else None

    def waits_in(self, number: int) -> bool:
        """Return True if the call with this sequence number has not ended."""
        return self.log.waiting and not self.log.later and number == self.end - 1

    @property
    def did(self) -> str:
        """Last activity of the ranks, in words."""
        last = self.at(self.end - 1)
        call = f"{'waits in' if self.log.waiting else 'last'} {last.operation}" if last else "no collective"
        endings = list(dict.fromkeys(log.at_end for log in self.logs if log.at_end))
        return join_names(endings, most=_MOST_DOING) or call


def timeline_view(timeline: CollectiveTimeline) -> dict[str, Any]:
    """Return the template variables of a process group's timeline."""
    logs_by_calls = group_by(timeline.ranks, lambda log: (log.first, log.calls, log.waiting, log.waits_for))
    groups = [Group(logs, timeline.calls) for logs in logs_by_calls.values()]
    shown = groups[:MOST_GROUPS]
    hidden_ranks = [log.rank for group in groups[MOST_GROUPS:] for log in group.logs]
    summary = f"{' | '.join(group.name for group in shown)}: ranks that called the same share a column."
    summary += f" {format_ranks(hidden_ranks)} differ from these, and are left out." if hidden_ranks else ""
    at_end = group_by((log for log in timeline.ranks if log.at_end), lambda log: log.at_end)
    last = max((group.end for group in shown), default=0)
    start = max(min((group.log.first for group in shown), default=0), last - _MOST, 0)
    if timeline.parts_at is not None:
        start = max(min(start, timeline.parts_at), timeline.parts_at - _BEFORE)
    end = min(last + any(group.end < last or group.log.waiting for group in shown), start + _MOST)
    before = f"the {plural(start, 'collective')} before these are not shown" if start else "from the first one on"
    after = f", nor the {last - end} after them" if last > end else ""
    numbers = [number for number in range(start, end) if any(group.at(number) for group in shown)]
    waits = _waits(shown)
    return {
        "timeline": timeline,
        "summary": summary,
        "groups": shown,
        "numbers": numbers,
        "same": {n for n in numbers if len({(group.at(n), group.waits_in(n)) for group in shown}) == 1},
        "caption": f"Collectives in the order in which each group of ranks has called them ({before}{after})",
        "endings": [
            (format_ranks(log.rank for log in logs), text)
            for text, logs in itertools.islice(at_end.items(), _MOST_ENDS)
        ],
        "waits": waits,
        "waiting": [(shown[index].name, ", ".join(shown[i].name for i in others)) for index, others in waits.items()],
    }


def _waits(groups: Sequence[Group]) -> dict[int, list[int]]:
    """Map each group's index to the indices of groups that the group waits for."""
    number_of = {log.rank: number for number, group in enumerate(groups) for log in group.logs}
    waits = {
        number: sorted({number_of[rank] for rank in group.log.waits_for if rank in number_of} - {number})
        for number, group in enumerate(groups)
    }
    return {number: others for number, others in waits.items() if others}


MOST_SIDES = 4
_MOST_IN_ALL = 200  # lines of evidence
_OF_RANK = re.compile(r"rank (\d+)((?: stack)?[:,].*)", re.DOTALL)


class Source(NamedTuple):
    """Source lines around a location, and a description."""

    location: Location
    excerpt: SourceExcerpt
    what: str


def finding_view(finding: Finding, report: Report) -> dict[str, Any]:
    """Return the template variables of a finding."""
    facts = {fact.kind: fact for fact in facts_of(finding)}
    evidence = facts.pop("evidence").lines if "evidence" in facts else ()
    num_hidden = len(evidence) - _MOST_IN_ALL
    sources = [_source(location, finding, report.excerpts) for location in finding.places] + _sides(finding, report)
    size = report.world.get("world_size")
    known_ranks = range(size) if isinstance(size, int) and size <= 1_000_000 else ()
    others = sorted({*known_ranks} - {*finding.ranks}) if finding.ranks else []  # ranks without the defect
    when = [format_ranks(finding.ranks)] if finding.ranks else []
    when += [format_steps(finding.steps)] if finding.steps else []
    return {
        "finding": finding,
        "kind": finding.severity.value,
        "facts": facts,
        "others": others,
        "evidence": [
            *merge_ranks(evidence[:_MOST_IN_ALL]),
            *([f"and {num_hidden} more lines"] if num_hidden > 0 else []),
        ],
        "sources": [source for source in sources if source is not None],
        "when": ", ".join(when),
        "rule": RULES.get(finding.code),
    }


def _source(location: Location, finding: Finding, excerpts: Sequence[SourceExcerpt], what: str = "") -> Source | None:
    for excerpt in excerpts:
        if excerpt.path == location.path and excerpt.first <= location.line < excerpt.first + len(excerpt.lines):
            break
    else:
        return None
    path = finding.path
    if path is not None and location == path.begins_at:
        what = f", where {path.reason} begins"
    elif path is not None and path.steps and location == path.steps[-1].location:
        what = ", where the path ends"
    elif role := next((entry.role for entry in finding.related if entry.location == location), ""):
        what = f": {role}"
    return Source(location, excerpt, what)


def _sides(finding: Finding, report: Report) -> list[Source | None]:
    """Return the source around the calls in which ranks differ, for a DDP4xx finding."""
    rule = RULES.get(finding.code)
    if rule is None or rule.family != "running":
        return []
    sides = [side for timeline in report.timelines[:1] for side in timeline.sides()]
    return [
        _source(location, finding, report.excerpts, f": {call.operation} of {format_ranks(ranks)}")
        for ranks, call, location in sides[:MOST_SIDES]
        if len({location for _, _, location in sides}) > 1 and location not in finding.places
    ]


def merge_ranks(evidence: Sequence[str]) -> list[str]:
    """Merge lines of evidence that are equal except for the rank."""
    matches = [(_OF_RANK.fullmatch(line), line) for line in evidence]
    groups = group_by(matches, lambda pair: pair[0][2] if pair[0] else (pair[1],))
    return [
        f"{format_ranks(int(match[1]) for match, _ in pairs if match)}{text}" if isinstance(text, str) else pairs[0][1]
        for text, pairs in groups.items()
    ]


# Modules


@dataclass(slots=True)
class Branch:
    """Module with children, own findings, and the worst finding of its subtree.

    `findings` has the findings on the module itself, by the name of its parameter or buffer, then by code.
    """

    entry: ModuleEntry
    inside: list[Branch] = field(default_factory=list)
    findings: dict[str, dict[str, Finding]] = field(default_factory=dict)
    worst: Finding | None = None


def module_tree(report: Report) -> list[Branch]:
    """Return the trees of top-level modules."""
    branches = {entry.name: Branch(entry) for entry in report.modules}
    roots: list[Branch] = []
    for name, branch in branches.items():
        parents = [branches[holder].inside for holder in _ancestors(name) if holder in branches and holder != name]
        (parents or [roots])[0].append(branch)
    for finding in sorted_findings(report):
        for subject in finding.subjects:
            owners = [holder for holder in _ancestors(subject) if holder in branches]
            if not owners or (subject and owners[0] == "" and subject not in branches[""].entry.parameters):
                continue
            part = subject[len(owners[0]) :].lstrip(".")
            branches[owners[0]].findings.setdefault(part, {})[finding.code] = finding
            for holder in owners:
                branches[holder].worst = branches[holder].worst or finding  # sorted worst first
    return roots


def _ancestors(name: str) -> Iterator[str]:
    """Yield `name` and the paths of its parent modules, ending with the model ("")."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
