"""Findings on a page: what is wrong, where, what to change, and what it rests on.

This module is light: it never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpcheck.findings.figures import SourceExcerpt
from ddpcheck.findings.report import Finding, Location, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import counted, format_ranks, format_steps, group_by
from ddpcheck.render.page.frame import Content, Markup, code, folded, table, tag
from ddpcheck.render.page.pictures import path_picture

MOST_FINDINGS = 100
MOST_SIDES = 4
_MOST_NAMES = 12
_MOST_IN_ALL = 200  # names, and lines of evidence
_OPEN = 8  # lines of evidence that stand there unfolded
_OF_RANK = re.compile(r"rank (\d+)((?: stack)?[:,].*)", re.DOTALL)


def findings(report: Report) -> Content:
    """All findings, worst first."""
    ordered = sorted(report.findings, key=Finding.sort_key)
    shown = [_finding(number, one, report) for number, one in enumerate(ordered[:MOST_FINDINGS], 1)]
    rest = len(ordered) - len(shown)
    return [shown, tag("p", f"And {counted(rest, 'more finding')}, in the data of this page.") if rest else None]


def accepted(report: Report) -> Content:
    """Findings that do not count, each with its reason."""
    rows: list[list[Content]] = []
    for one in report.accepted[:MOST_FINDINGS]:
        found, how = one.finding, "known from the baseline" if one.by == "baseline" else f"suppressed: {one.reason}"
        rows.append([f"{found.code} {found.severity.value}", [found.message, _names(found.subjects)], how])
    rest = len(report.accepted) - len(rows)
    left = tag("p", f"And {counted(rest, 'more finding')}, in the data of this page.") if rest else None
    title = f"{counted(len(report.accepted), 'finding')} that {'do' if len(report.accepted) > 1 else 'does'} not count"
    return [table(["rule", "finding", "why it does not count"], rows, title, "stacks"), left]


def _finding(number: int, finding: Finding, report: Report) -> Markup:
    rule, kind = RULES.get(finding.code), finding.severity.value
    title = [tag("span", kind, class_=f"badge {kind}"), f" {finding.code} {rule.name if rule else ''}"]
    sources = [_source(place, finding, report.excerpts) for place in finding.places] + _sides(finding, report)
    where = [format_ranks(finding.ranks)] if finding.ranks else []
    where += [format_steps(finding.steps)] if finding.steps else []
    said = f", where it ends ({', '.join(where)})" if where else ""
    picture = path_picture(finding.path, said) if finding.path is not None else None
    why = [tag("p", f"{rule.summary} {rule.why}"), _example(rule.example)] if rule else []
    return tag(
        "article",
        tag("h3", title, id=f"finding-{number}-title"),
        tag("p", finding.message, class_="message"),
        _names(finding.subjects),
        tag("p", _place(finding, report.world.get("world_size")), class_="muted"),
        tag("div", tag("h4", "What to change"), tag("p", finding.what_to_do), class_="fix")
        if finding.what_to_do
        else None,
        tag("div", tag("div", sources), picture, class_="pictures") if picture else sources,
        _evidence(finding.evidence),
        folded("Why this matters under DDP", *why) if why else None,
        class_=f"finding {kind}",
        id=f"finding-{number}",
        aria_labelledby=f"finding-{number}-title",
    )


def _names(subjects: Sequence[str]) -> Content:
    if not subjects:
        return None
    first, rest = subjects[:_MOST_NAMES], subjects[_MOST_NAMES:_MOST_IN_ALL]
    more = folded(f"{len(subjects) - _MOST_NAMES} more", [[code(name), " "] for name in rest]) if rest else None
    return [tag("p", [code(name) for name in first], class_="names"), more]


def _place(finding: Finding, world_size: object) -> Content:
    parts: list[Content] = [code(str(finding.location)), " · "] if finding.location else []
    parts.append(f"on {format_ranks(finding.ranks)}" if finding.ranks else "on every rank")
    if finding.ranks and isinstance(world_size, int) and 0 < world_size <= 1_000_000:
        others = sorted(set(range(world_size)) - set(finding.ranks))
        parts.append(f", not on {format_ranks(others)}" if others else "")
    if finding.steps:
        parts.append(f" · in {format_steps(finding.steps)}")
    return parts


def _source(place: Location, finding: Finding, excerpts: Sequence[SourceExcerpt], what: str = "") -> Markup | None:
    """The lines around `place`, with that line marked; None where they are not in the report."""
    excerpt = next((one for one in excerpts if one.path == place.path and _holds(one, place.line)), None)
    if excerpt is None:
        return None
    lines = [
        tag("span", tag("span", str(number)), line or " ", class_="line here" if number == place.line else "line")
        for number, line in enumerate(excerpt.lines, excerpt.first)
    ]
    path = finding.path
    if path is not None and place == path.begins_at:
        what = f", where {path.reason} begins"
    elif path is not None and path.steps and place == path.steps[-1].location:
        what = ", where the path ends"
    elif path is not None:
        what = f", which makes {finding.subjects[0] if finding.subjects else path.parameter}"
    source = tag("pre", lines, tabindex=0, aria_label=f"source of {place}")
    return tag("figure", tag("figcaption", code(str(place)), what), source)


def _sides(finding: Finding, report: Report) -> list[Markup | None]:
    """For ranks that have parted: the line at which each of them is."""
    if not finding.code.startswith("DDP4"):
        return []
    sides = [side for timeline in report.timelines[:1] for side in timeline.sides()]
    return [
        _source(place, finding, report.excerpts, f": {call.operation} of {format_ranks(ranks)}")
        for ranks, call, place in sides[:MOST_SIDES]
        if len({place for _, _, place in sides}) > 1 and place not in finding.places
    ]


def _holds(excerpt: SourceExcerpt, line: int) -> bool:
    return excerpt.first <= line < excerpt.first + len(excerpt.lines)


def _evidence(evidence: Sequence[str]) -> Content:
    lines = together(evidence[:_MOST_IN_ALL])
    if not lines:
        return None
    left = len(evidence) - _MOST_IN_ALL
    items = [tag("li", line) for line in lines] + ([tag("li", f"and {left} more lines")] if left > 0 else [])
    title = f"Evidence ({counted(len(items), 'fact')})"
    return folded(title, tag("ul", items, class_="evidence"), is_open=len(items) <= _OPEN)


def together(evidence: Sequence[str]) -> list[str]:
    """Lines of evidence, and those that say the same of several ranks as one."""
    found = [(_OF_RANK.fullmatch(line), line) for line in evidence]
    groups = group_by(found, lambda one: one[0][2] if one[0] else (one[1],))
    return [
        f"{format_ranks(int(match[1]) for match, _ in alike if match)}{text}" if isinstance(text, str) else alike[0][1]
        for text, alike in groups.items()
    ]


def _example(example: str) -> Content:
    return [tag("p", "An example that breaks the rule:"), tag("pre", example.rstrip())] if example else None
