"""Reports findings to the user as an exception, a warning or a call of their function, each cause once.

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
    """A finding in a training loop that goes on.

    Attributes:
        finding: What was found; `None` where only the text has come from another process (pytest-xdist sends that).
    """

    def __init__(self, finding: Finding | str) -> None:
        super().__init__(finding if isinstance(finding, str) else as_text(finding))
        self.finding = None if isinstance(finding, str) else finding

    def __reduce__(self) -> tuple[type[FindingWarning], tuple[Finding | str]]:
        return type(self), (self.finding or str(self),)


_OF_DDP = "'Expected to have finished reduction in the prior iteration'"
_IN_SHORT = "'Expected to have finished reduction ...'"
"""Lightning takes an error with the whole sentence in it for DDP's own, and puts its advice in place of the text."""


def as_text(finding: Finding) -> str:
    """A finding on a few lines: what, where, on which ranks, in which steps, and what to do."""
    from ddpcheck.findings.rules import RULES

    rule = RULES[finding.code]
    where = f" at {finding.location}" if finding.location else ""
    lines = [f"{finding.code} {rule.name}{where}: {finding.message}"]
    if not all(subject in finding.message for subject in finding.subjects):
        lines.append(f"  {join_names(finding.subjects, most=_MOST_SUBJECTS)}")
    if finding.ranks:
        lines.append(f"  on {format_ranks(finding.ranks)}")
    if finding.steps:
        lines.append(f"  in {format_steps(finding.steps)}")
    lines += [f"  {one}" for one in finding.related]
    lines += [f"  {fact.replace(_OF_DDP, _IN_SHORT)}" for fact in finding.evidence]
    lines.append(f"  fix: {finding.what_to_do}")
    return "\n".join(lines)


class FindingReporter:
    """Reports each cause once."""

    def __init__(
        self,
        options: WatchOptions,
        *,
        shows_warnings: bool,
        locate: Callable[[Finding], Finding] = lambda finding: finding,
        reported: Sequence[Finding] = (),
    ) -> None:
        """Begin with what somebody else has reported.

        Args:
            options: `on_finding` and `ignore` of these.
            shows_warnings: False on all ranks but one: they have the same findings.
            locate: Adds to a finding the line that it is about.
            reported: Findings that have been reported already.
        """
        self._reported = ReportedCauses(reported)
        self._on_finding = options.on_finding
        self._ignore = tuple(options.ignore)
        self._shows_warnings = shows_warnings
        self._locate = locate

    @property
    def findings(self) -> list[Finding]:
        """All that were reported, in their order."""
        return self._reported.findings

    def report(self, findings: Iterable[Finding]) -> None:
        """Report those of `findings` whose cause is new, worst first.

        Raises:
            FindingsError: There is an error among them, and errors are to be raised; after all have been noted.
        """
        chosen = select_findings(findings, ignore=self._ignore)
        new = self._reported.add(chosen, lambda finding: without_prefix(self._locate(finding)))
        errors = [finding for finding in new if finding.severity is Severity.ERROR]
        for finding in new:
            raised = finding in errors and self._on_finding == "raise"
            if callable(self._on_finding):
                self._on_finding(finding)
            elif self._shows_warnings and not raised and finding.severity is not Severity.NOTE:
                here = user_location() or Location(__file__, 1)  # the line that calls backward, say
                warnings.warn_explicit(FindingWarning(finding), FindingWarning, here.path, here.line)
        if errors and self._on_finding == "raise":
            raise FindingsError("\n".join(as_text(finding) for finding in errors), errors)
