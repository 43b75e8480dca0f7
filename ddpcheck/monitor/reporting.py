"""Options of a watch, and reporting of findings by exception, warning or function call.

This module is light: it never imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpcheck.findings.errors import FindingsError, UsageError
from ddpcheck.findings.report import Finding, Location, select_findings
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import format_ranks, format_steps, join_names, without_prefix
from ddpcheck.rules.causes import ReportedCauses
from ddpcheck.worlds.validation import check_seconds

_MOST_SUBJECTS = 12

OnFinding = Literal["raise", "warn"] | Callable[[Finding], object]
"""Action on a finding: raise an exception, warn, or call a function."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of a watch, documented in `ddpcheck.watch`; an invalid value raises `UsageError`."""

    detect_anomalous_params: bool = True
    check_consistency_every: int = 0
    check_parity_every: int = 0
    check_normalisation: bool = True
    on_finding: OnFinding = "raise"
    ignore: Sequence[str] = ()
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("check_consistency_every", "check_parity_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name} is a number of steps, or 0 for never, not {value!r}")
        check_seconds("timeout", self.timeout)
        if isinstance(self.ignore, str) or not all(isinstance(pattern, str) for pattern in self.ignore):
            raise UsageError(f"ignore is a list of rules, such as ['DDP215'], not {self.ignore!r}")
        if self.on_finding not in ("raise", "warn") and not callable(self.on_finding):
            expected = "'raise', 'warn' or a function that takes a Finding"
            raise UsageError(f"on_finding is {expected}, not {self.on_finding!r}")


class FindingWarning(UserWarning):
    """Warning for a finding in a training loop that continues.

    Attributes:
        finding: The finding; `None` if only the text was received from another process (pytest-xdist).
    """

    def __init__(self, finding: Finding | str) -> None:
        super().__init__(finding if isinstance(finding, str) else format_finding(finding))
        self.finding = None if isinstance(finding, str) else finding

    def __reduce__(self) -> tuple[type[FindingWarning], tuple[Finding | str]]:
        return type(self), (self.finding or str(self),)


_DDP_TEXT = "'Expected to have finished reduction in the prior iteration'"
_SHORT_TEXT = "'Expected to have finished reduction ...'"
"""Short form of `_DDP_TEXT`: Lightning replaces any error text that contains the whole sentence."""


def format_finding(finding: Finding) -> str:
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
    lines += [f"  {fact.replace(_DDP_TEXT, _SHORT_TEXT)}" for fact in finding.evidence]
    lines.append(f"  fix: {finding.what_to_do}")
    return "\n".join(lines)


class FindingReporter:
    """Reporter of findings; each cause is reported once."""

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
            is_raised = finding in errors and self._on_finding == "raise"
            if callable(self._on_finding):
                self._on_finding(finding)
            elif self._shows_warnings and not is_raised and finding.severity is not Severity.NOTE:
                location = user_location() or Location(__file__, 1)  # the line that calls backward, for example
                warnings.warn_explicit(FindingWarning(finding), FindingWarning, location.path, location.line)
        if errors and self._on_finding == "raise":
            raise FindingsError("\n".join(format_finding(finding) for finding in errors), errors)
