"""Telling what was found: an exception, a warning or the user's own function, and each cause once.

This module is light: it never imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ddpcheck.findings.errors import FindingsError, UsageError
from ddpcheck.findings.report import Finding, select_findings
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import format_ranks, format_steps, join_names
from ddpcheck.monitor.judging import cause_of, follows_from, goes_on

OnFinding = Literal["raise", "warn"] | Callable[[Finding], object]
"""What to do with a finding."""


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
    lines += [f"  {fact.replace(_OF_DDP, _IN_SHORT)}" for fact in finding.evidence]
    lines.append(f"  what to do: {finding.what_to_do}")
    return "\n".join(lines)


def checked_choice(on_finding: object) -> OnFinding:
    """`on_finding` if it is one of the choices.

    Raises:
        UsageError: It is not.
    """
    if on_finding in ("raise", "warn") or callable(on_finding):
        return on_finding
    raise UsageError(f"on_finding is 'raise', 'warn' or a function that takes a Finding, not {on_finding!r}")


def check_numbers(*, timeout: float, ignore: Sequence[str] = (), **everies: int) -> None:
    """Refuse settings that mean nothing.

    Args:
        timeout: Seconds.
        ignore: Rules, as codes, prefixes of codes or names.
        **everies: Numbers of steps.

    Raises:
        UsageError: One of them is wrong; names it.
    """
    for name, value in everies.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} is a number of steps, or 0 for never, not {value!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise UsageError(f"timeout is a number of seconds above 0, not {timeout!r}")
    if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
        raise UsageError(f"ignore is a list of rules, such as ['DDP215'], not {ignore!r}")


class FindingReporter:
    """Tells each cause once.

    Attributes:
        findings: All that were told, in their order.
        speaks: Whether this rank shows warnings; the others have the same findings, and keep quiet.
    """

    def __init__(
        self,
        on_finding: OnFinding,
        *,
        speaks: bool,
        locate: Callable[[Finding], Finding] = lambda finding: finding,
        ignore: Sequence[str] = (),
    ) -> None:
        self.findings: list[Finding] = []
        self.speaks = speaks
        self._on_finding = on_finding
        self._told: set[object] = set()
        self._locate = locate
        self._ignore = tuple(ignore)

    def take_as_told(self, findings: Sequence[Finding]) -> None:
        """Note findings that somebody else has told."""
        self.findings += findings
        self._told.update(map(cause_of, findings))

    def tell(self, findings: Iterable[Finding]) -> None:
        """Tell those of `findings` whose cause is new, worst first.

        Raises:
            FindingsError: There is an error among them, and errors are to be raised; after all have been noted.
        """
        new: list[Finding] = []
        findings = select_findings(findings, ignore=self._ignore)
        causes = [*self.findings, *findings]
        for finding in findings:
            cause = cause_of(finding)
            if cause not in self._told and not follows_from(finding, causes) and not goes_on(finding, self.findings):
                self._told.add(cause)
                new.append(self._locate(finding))
        self.findings += new
        errors = [finding for finding in new if finding.severity is Severity.ERROR]
        for finding in new:
            if callable(self._on_finding):
                self._on_finding(finding)
            elif self._is_shown(finding):
                warnings.warn(FindingWarning(finding), stacklevel=2)
        if errors and self._on_finding == "raise":
            raise FindingsError("\n".join(as_text(finding) for finding in errors), errors)

    def _is_shown(self, finding: Finding) -> bool:
        """Whether a warning is shown: not for notes, and not for errors that are raised."""
        raised = finding.severity is Severity.ERROR and self._on_finding == "raise"
        return self.speaks and not raised and finding.severity is not Severity.NOTE
