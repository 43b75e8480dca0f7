"""Verdicts of judges, and the check lines built from verdicts, for all entry points.

A judge returns findings; `verdicts_of` wraps them in a `Verdict`, with a description of the comparison. A check line is
built only from the verdicts under its heading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import CheckStatus, Finding, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import join_names, without_prefix
from ddpcheck.rules.causes import find_causes

FindingAndCause = tuple[Finding, Finding]  # a finding, and its root cause in the report (or itself)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison: findings, and what matches, differs or was not compared."""

    findings: Sequence[Finding] = ()
    matching: str = ""  # what matches, in a sentence; '' if nothing was compared
    lacking: str = ""  # why the comparison is incomplete; '' if complete
    differing: str = ""  # how much does not match; '' if all matches


@dataclass(frozen=True, slots=True)
class Judged:
    """Combined results of several views: findings with root causes, by check line."""

    findings: list[Finding]  # root causes only
    causes: Mapping[str, list[FindingAndCause]]  # all findings, by heading
    verdicts: Mapping[str, list[Verdict]]  # by heading
    errors: Mapping[str, Exception]  # exceptions raised by judges (bugs of ddpcheck), by heading
    returned: Sequence[tuple[str, Finding]]  # (heading, finding) as judges return findings
    reported: Sequence[tuple[str, Finding]]  # (heading, finding) that repeats one of an earlier view

    def status_of(self, heading: str, kept: Sequence[Finding]) -> tuple[CheckStatus, str] | None:
        """Return a check line's status and sentence; None if nothing was compared or found."""
        explained = self.causes.get(heading, [])
        columns = zip(*((v.matching, v.lacking, v.differing) for v in self.verdicts.get(heading, [])), strict=True)
        texts = ["; ".join(dict.fromkeys(filter(None, column))) for column in columns] or ["", "", ""]
        return status_of(Verdict((), *texts), explained, kept) if explained or texts[0] or texts[1] else None

    def with_findings(self, heading: str, findings: Sequence[Finding]) -> Judged:
        """Return a copy with `findings` added to a check line, and causes computed again."""
        added = [*self.returned, *((heading, finding) for finding in findings)]
        return group_by_cause(added, self.verdicts, self.errors, self.reported)


def group_by_cause(
    findings: Sequence[tuple[str, Finding]],
    verdicts: Mapping[str, list[Verdict]],
    errors: Mapping[str, Exception],
    reported: Sequence[tuple[str, Finding]],
) -> Judged:
    """Group findings by check line, each with its root cause.

    `reported`: repeated findings of later views, which get the root cause of the earlier finding with the same code.
    """
    causes = find_causes([finding for _, finding in findings])
    explained: dict[str, list[FindingAndCause]] = {}
    for (heading, finding), cause in zip(findings, causes.root_causes, strict=True):
        if cause is not None:
            explained.setdefault(heading, []).append((without_prefix(finding), without_prefix(cause)))
    pairs = [pair for group in explained.values() for pair in group]
    for heading, finding in reported:
        cause = next((root for known, root in pairs if known.code == finding.code), None)
        if cause is not None:
            explained.setdefault(heading, []).append((without_prefix(finding), cause))
    return Judged([*map(without_prefix, causes.findings)], explained, verdicts, errors, findings, reported)


def status_of(
    verdict: Verdict, explained: Sequence[FindingAndCause], kept: Sequence[Finding]
) -> tuple[CheckStatus, str]:
    """Return a check line's status and sentence.

    `kept`: findings that the user does not ignore; a finding with an ignored cause does not fail the line.
    """
    shown = [(finding, cause) for finding, cause in explained if cause in kept]
    severities = ((cause if cause.code == finding.code else finding).severity for finding, cause in shown)
    worst = min(severities, key=lambda severity: severity.rank, default=None)
    listed = _describe_findings(shown, verdict)
    if worst is Severity.ERROR:
        return "failed", listed
    hidden = _describe_findings([(finding, cause) for finding, cause in explained if cause not in kept], verdict)
    if verdict.differing:  # in some steps; others were not compared
        if shown:
            return "warned", listed
        return ("ignored", f"ignored: {hidden}") if hidden else ("failed", f"{verdict.differing}, cause unknown")
    if verdict.lacking:
        passed = _drop_buffers(verdict.matching) if explained else verdict.matching
        return "skipped", f"{passed}; {verdict.lacking}" if passed else verdict.lacking
    if worst is Severity.WARNING:
        return "warned", listed
    if hidden:
        return "ignored", f"ignored: {hidden}"
    return "passed", f"{verdict.matching}; {listed}" if listed else verdict.matching


def _describe_findings(explained: Sequence[FindingAndCause], verdict: Verdict) -> str:
    """Return codes of findings, and what differs or matches: "DDP215; all gradients match"."""
    parts = [f.code for f, cause in explained if cause.code == f.code]
    parts += [f"{f.code}, which comes with {cause.code}" for f, cause in explained if cause.code != f.code]
    codes = join_names(list(dict.fromkeys(parts)), most=5)
    if not codes or verdict.differing:
        return f"{codes}: {verdict.differing}" if codes else ""
    stands = bool(verdict.matching) and all(RULES[finding.code].buffers_only for finding, _ in explained)
    return f"{codes}; {_drop_buffers(verdict.matching)}" if stands else codes


def _drop_buffers(sentence: str) -> str:
    return sentence.replace(", buffers and", " and").replace(" and buffers", "")
