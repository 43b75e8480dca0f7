"""What the page shows of a finding beside its facts: places, lines of source, and modules in the tree of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddpcheck.findings.figures import ModuleEntry, SourceExcerpt
from ddpcheck.findings.report import Finding, Location, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_ranks, format_steps, group_by
from ddpcheck.render.parts import facts_of, sorted_findings

MOST_SIDES = 4
_MOST_IN_ALL = 200  # lines of evidence
_OF_RANK = re.compile(r"rank (\d+)((?: stack)?[:,].*)", re.DOTALL)


class Source(NamedTuple):
    """Lines around a place, and what is there."""

    place: Location
    excerpt: SourceExcerpt
    what: str


def finding_view(finding: Finding, report: Report) -> dict[str, Any]:
    """What the template of a finding shows, by name."""
    facts = {fact.kind: fact for fact in facts_of(finding)}
    evidence = facts.pop("evidence").lines if "evidence" in facts else ()
    left = len(evidence) - _MOST_IN_ALL
    sources = [_source(place, finding, report.excerpts) for place in finding.places] + _sides(finding, report)
    when = [format_ranks(finding.ranks)] if finding.ranks else []
    when += [format_steps(finding.steps)] if finding.steps else []
    return {
        "finding": finding,
        "kind": finding.severity.value,
        "facts": facts,
        "others": _others(finding.ranks, report.world.get("world_size")),
        "evidence": [*together(evidence[:_MOST_IN_ALL]), *([f"and {left} more lines"] if left > 0 else [])],
        "sources": [source for source in sources if source is not None],
        "when": ", ".join(when),
        "rule": RULES.get(finding.code),
    }


def _others(ranks: Sequence[int], world_size: object) -> list[int]:
    """The ranks that a finding does not concern; none where it concerns all, or where the others are not known."""
    if not ranks or not isinstance(world_size, int) or world_size > 1_000_000:
        return []
    return sorted(set(range(world_size)) - set(ranks))


def _source(place: Location, finding: Finding, excerpts: Sequence[SourceExcerpt], what: str = "") -> Source | None:
    """The lines around `place`; None where they are not in the report."""
    for excerpt in excerpts:
        if excerpt.path == place.path and excerpt.first <= place.line < excerpt.first + len(excerpt.lines):
            break
    else:
        return None
    path = finding.path
    if path is not None and place == path.begins_at:
        what = f", where {path.reason} begins"
    elif path is not None and path.steps and place == path.steps[-1].location:
        what = ", where the path ends"
    elif path is not None:
        what = f", which makes {finding.subjects[0] if finding.subjects else path.parameter}"
    return Source(place, excerpt, what)


def _sides(finding: Finding, report: Report) -> list[Source | None]:
    """For ranks that have parted: the line at which each of them is."""
    if not finding.code.startswith("DDP4"):
        return []
    sides = [side for timeline in report.timelines[:1] for side in timeline.sides()]
    return [
        _source(place, finding, report.excerpts, f": {call.operation} of {format_ranks(ranks)}")
        for ranks, call, place in sides[:MOST_SIDES]
        if len({place for _, _, place in sides}) > 1 and place not in finding.places
    ]


def together(evidence: Sequence[str]) -> list[str]:
    """Lines of evidence, and those that say the same of several ranks as one."""
    found = [(_OF_RANK.fullmatch(line), line) for line in evidence]
    groups = group_by(found, lambda one: one[0][2] if one[0] else (one[1],))
    return [
        f"{format_ranks(int(match[1]) for match, _ in alike if match)}{text}" if isinstance(text, str) else alike[0][1]
        for text, alike in groups.items()
    ]


# Modules


@dataclass(slots=True)
class Branch:
    """A module, those in it, the findings on it or on its own parameters, and the worst one in or below it.

    Findings are by the part of the module that they name, and there by code.
    """

    entry: ModuleEntry
    inside: list[Branch] = field(default_factory=list)
    told: dict[str, dict[str, Finding]] = field(default_factory=dict)
    worst: Finding | None = None


def module_tree(report: Report) -> list[Branch]:
    """The modules that no other one holds."""
    branches = {entry.name: Branch(entry) for entry in report.modules}
    top: list[Branch] = []
    for name, branch in branches.items():
        holders = [branches[holder].inside for holder in _upwards(name) if holder in branches and holder != name]
        (holders or [top])[0].append(branch)
    for finding in sorted_findings(report):
        for subject in finding.subjects:
            held_by = [holder for holder in _upwards(subject) if holder in branches]
            if not held_by or (subject and held_by[0] == "" and subject not in branches[""].entry.parameters):
                continue
            part = subject[len(held_by[0]) :].lstrip(".")
            branches[held_by[0]].told.setdefault(part, {})[finding.code] = finding
            for holder in held_by:
                branches[holder].worst = branches[holder].worst or finding  # the worst come first
    return top


def _upwards(name: str) -> Iterator[str]:
    """A name, and those of all that hold it; the model itself is the last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
