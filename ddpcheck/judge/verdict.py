"""Verdicts of judges, and the check lines built from verdicts, for all entry points.

A judge returns findings; a row wraps findings in a `Verdict`, with a description of the comparison; `judge_all` runs
the rows of a table. A check line is built only from the verdicts under its heading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpcheck.findings.report import CheckStatus, Finding, Severity
from ddpcheck.findings.wording import join_names, without_prefix
from ddpcheck.judge.causes import find_causes

Facts = TypeVar("Facts")
OF_BUFFERS = ("DDP214", "DDP215")  # no effect on the gradients of a step

Told = tuple[Finding, Finding]  # a finding, and its root cause in the report (or itself)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison."""

    findings: Sequence[Finding] = ()
    held: str = ""  # what matches, in a sentence; '' if nothing was compared
    lacking: str = ""  # why the comparison is incomplete; '' if complete
    differing: str = ""  # how much does not match; '' if all matches


Verdicts = Mapping[str, Verdict]  # by heading (name of a check line)


@dataclass(frozen=True, slots=True)
class Row(Generic[Facts]):
    """A row in the table of an entry point."""

    judge: Callable[[Facts], Verdicts]
    headings: tuple[str, ...]  # headings of the verdicts
    codes: tuple[str, ...]  # rules that the row can report
    # findings of these codes are dropped if an earlier (more specific) row found any of these codes
    yields: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()  # skip the row if an earlier row found any of these codes
    over_ranks: bool = True  # if the row compares all ranks


@dataclass(frozen=True, slots=True)
class Judged:
    """Combined results of the rows of a table."""

    findings: list[Finding]  # root causes only
    told: Mapping[str, list[Told]]  # all findings, by heading
    verdicts: Mapping[str, list[Verdict]]  # by heading
    errors: Mapping[str, Exception]  # exceptions raised by judges (bugs of ddpcheck), by heading
    found: Sequence[tuple[str, Finding]]  # (heading, finding) as judges return findings
    reported: Sequence[tuple[str, Finding]]  # (heading, finding) dropped by `Row.yields`

    def status_of(self, heading: str, kept: Sequence[Finding]) -> tuple[CheckStatus, str] | None:
        """Return a check's status and a sentence, or `None`; ignore findings not in `kept`."""
        told = self.told.get(heading, [])
        said = zip(*((one.held, one.lacking, one.differing) for one in self.verdicts.get(heading, [])), strict=True)
        texts = ["; ".join(dict.fromkeys(filter(None, some))) for some in said] or ["", "", ""]
        return status_of(Verdict((), *texts), told, kept) if told or texts[0] or texts[1] else None

    def adding(self, heading: str, findings: Sequence[Finding]) -> Judged:
        """Return a copy with further findings, which may explain earlier findings."""
        added = [*self.found, *((heading, finding) for finding in findings)]
        return _by_causes(added, self.verdicts, self.errors, self.reported)


def judge_all(facts: Facts, rows: Sequence[Row[Facts]], but: Collection[str] = ()) -> Judged:
    """Run rows in order, dropping headings in `but`; record exceptions of judges."""
    found: list[tuple[str, Finding]] = []
    verdicts: dict[str, list[Verdict]] = {}
    errors: dict[str, Exception] = {}
    reported: list[tuple[str, Finding]] = []
    for row in rows:
        known = {finding.code for _, finding in found}
        if not known.isdisjoint(row.unless):
            continue
        try:
            said = row.judge(facts)
        except Exception as error:
            errors |= dict.fromkeys(row.headings, error)
            continue
        left_out = () if known.isdisjoint(row.yields) else row.yields
        for heading, verdict in said.items():
            if heading in but:
                continue
            verdicts.setdefault(heading, []).append(verdict)
            found += ((heading, finding) for finding in verdict.findings if finding.code not in left_out)
            reported += ((heading, finding) for finding in verdict.findings if finding.code in left_out)
    return _by_causes(found, verdicts, errors, reported)


def _by_causes(
    found: Sequence[tuple[str, Finding]],
    verdicts: Mapping[str, list[Verdict]],
    errors: Mapping[str, Exception],
    reported: Sequence[tuple[str, Finding]],
) -> Judged:
    """Find root causes; `reported` findings are attached to findings of equal code."""
    causes = find_causes([finding for _, finding in found])
    told: dict[str, list[Told]] = {}
    for (heading, finding), by in zip(found, causes.told_by, strict=True):
        if by is not None:
            told.setdefault(heading, []).append((without_prefix(finding), without_prefix(by)))
    every = [one for some in told.values() for one in some]
    for heading, finding in reported:
        by = next((root for one, root in every if one.code == finding.code), None)
        if by is not None:
            told.setdefault(heading, []).append((without_prefix(finding), by))
    return Judged([*map(without_prefix, causes.findings)], told, verdicts, errors, found, reported)


# Check lines


def status_of(verdict: Verdict, told: Sequence[Told], kept: Sequence[Finding]) -> tuple[CheckStatus, str]:
    """Return the status of a check and a sentence; ignore findings not in `kept`."""
    shown = [(finding, by) for finding, by in told if by in kept]
    severities = ((by if by.code == finding.code else finding).severity for finding, by in shown)
    worst = min(severities, key=lambda severity: severity.rank, default=None)
    said = _listed(shown, verdict)
    if worst is Severity.ERROR:
        return "failed", said
    hidden = _listed([(finding, by) for finding, by in told if by not in kept], verdict)
    if verdict.differing:  # in some steps; others were not compared
        if shown:
            return "warned", said
        return ("ignored", f"ignored: {hidden}") if hidden else ("failed", f"{verdict.differing}, cause unknown")
    if verdict.lacking:
        held = _without_buffers(verdict.held) if told else verdict.held
        return "skipped", f"{held}; {verdict.lacking}" if held else verdict.lacking
    if worst is Severity.WARNING:
        return "warned", said
    if hidden:
        return "ignored", f"ignored: {hidden}"
    return "passed", f"{verdict.held}; {said}" if said else verdict.held


def _listed(told: Sequence[Told], verdict: Verdict) -> str:
    """List the codes found with what differs or still matches, or return ''."""
    said = [f.code for f, by in told if by.code == f.code]
    said += [f"{f.code}, which comes with {by.code}" for f, by in told if by.code != f.code]
    codes = join_names(list(dict.fromkeys(said)), most=5)
    if not codes or verdict.differing:
        return f"{codes}: {verdict.differing}" if codes else ""
    stands = bool(verdict.held) and all(finding.code in OF_BUFFERS for finding, _ in told)
    return f"{codes}; {_without_buffers(verdict.held)}" if stands else codes


def _without_buffers(held: str) -> str:
    """Drop buffers from a sentence on what matches."""
    return held.replace(", buffers and", " and").replace(" and buffers", "")
