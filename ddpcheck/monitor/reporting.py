"""Reporting of findings as an exception, warning or function call.

This module is light: it never imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from ddpcheck.findings.errors import FindingsError
from ddpcheck.findings.report import Finding, Location, select_findings
from ddpcheck.findings.rules.rule import Severity
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import format_ranks, format_steps, join_names, without_prefix
from ddpcheck.judge.causes import ReportedCauses
from ddpcheck.monitor.options import WatchOptions

_MOST_SUBJECTS = 12


class FindingWarning(UserWarning):
    """Warning for a finding in a training loop that continues.

    Attributes:
        finding: The finding; `None` if only the text was received from another process (pytest-xdist).
    """

    def __init__(self, finding: Finding | str) -> None:
        super().__init__(finding if isinstance(finding, str) else as_text(finding))
        self.finding = None if isinstance(finding, str) else finding

    def __reduce__(self) -> tuple[type[FindingWarning], tuple[Finding | str]]:
        return type(self), (self.finding or str(self),)


_OF_DDP = "'Expected to have finished reduction in the prior iteration'"
_IN_SHORT = "'Expected to have finished reduction ...'"
"""Shortened because Lightning replaces any error text that contains the whole sentence."""


def as_text(finding: Finding) -> str:
    """Format a finding: rule, location, message, ranks, steps, evidence and fix."""
    from ddpcheck.findings.rules import RULES

    rule = RULES[finding.code]
    location = f" at {finding.location}" if finding.location else ""
    lines = [f"{finding.code} {rule.name}{location}: {finding.message}"]
    if not all(subject in finding.message for subject in finding.subjects):
        lines.append(f"  {join_names(finding.subjects, most=_MOST_SUBJECTS)}")
    if finding.ranks:
        lines.append(f"  on {format_ranks(finding.ranks)}")
    if finding.steps:
        lines.append(f"  in {format_steps(finding.steps)}")
    lines += [f"  {item}" for item in finding.related]
    lines += [f"  {fact.replace(_OF_DDP, _IN_SHORT)}" for fact in finding.evidence]
    lines.append(f"  fix: {finding.what_to_do}")
    return "\n".join(lines)


class FindingReporter:
    """Reporter of findings, once per cause."""

    def __init__(
        self,
        options: WatchOptions,
        *,
        shows_warnings: bool,
        locate: Callable[[Finding], Finding] = lambda finding: finding,
        reported: Sequence[Finding] = (),
    ) -> None:
        self._reported = ReportedCauses(reported)
        self._on_finding = options.on_finding
        self._ignore = tuple(options.ignore)
        self._shows_warnings = shows_warnings  # on one rank only, since all have the same findings
        self._locate = locate  # adds the source line to a finding

    @property
    def findings(self) -> list[Finding]:
        return self._reported.findings

    def report(self, findings: Iterable[Finding]) -> None:
        """Report the findings whose cause is new, worst first.

        Raises:
            FindingsError: A new finding is an error and `on_finding` is "raise"; raised after all are recorded.
        """
        selected = select_findings(findings, ignore=self._ignore)
        new = self._reported.add(selected, lambda finding: without_prefix(self._locate(finding)))
        errors = [finding for finding in new if finding.severity is Severity.ERROR]
        for finding in new:
            raised = finding in errors and self._on_finding == "raise"
            if callable(self._on_finding):
                self._on_finding(finding)
            elif self._shows_warnings and not raised and finding.severity is not Severity.NOTE:
                location = user_location() or Location(__file__, 1)  # the line that calls backward, for example
                warnings.warn_explicit(FindingWarning(finding), FindingWarning, location.path, location.line)
        if errors and self._on_finding == "raise":
            raise FindingsError("\n".join(as_text(finding) for finding in errors), errors)
