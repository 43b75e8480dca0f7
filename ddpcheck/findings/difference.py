"""The difference of two reports: what is new, what is fixed, what remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS
from ddpcheck.findings.report import Document, Finding, Report, ReportError
from ddpcheck.findings.rules.rule import Severity
from ddpcheck.findings.selection import is_known, marks, not_found


@dataclass(frozen=True, slots=True)
class ReportDifference(Document):
    """What a newer report has that an older one has not, and the other way round.

    Attributes:
        old: The older report, as it was named.
        new: The newer one.
        added: Findings that only the newer one has, or has as more severe, or for more parameters.
        fixed: Findings of the older one that the newer one looked for and has not.
        remaining: Findings that both have, as the newer one has them.
        open: Findings of the older one that the newer one has not, where not every check was made, or their rules are
            ignored.
        notes: Sentences on what makes the two hard to compare.
        error: That of the newer report.
    """

    old: str
    new: str
    added: tuple[Finding, ...] = ()
    fixed: tuple[Finding, ...] = ()
    remaining: tuple[Finding, ...] = ()
    open: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    error: ReportError | None = None

    @property
    def summary(self) -> str:
        """How many of each, in words."""
        counts = {"new": self.added, "fixed": self.fixed, "remaining": self.remaining, "not known": self.open}
        said = ", ".join(f"{len(found)} {how}" for how, found in counts.items() if found)
        return said or "no findings in either report"

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """1 for a new finding at or above `fail_on`; that of the newer report where it has stopped."""
        if self.error is not None:
            return self.error.exit_code
        bad = fail_on is not None and any(finding.severity.reaches(fail_on) for finding in self.added)
        return EXIT_FINDINGS if bad else EXIT_CLEAN

    def to_dict(self) -> dict[str, Any]:
        return {**Document.to_dict(self), "kind": "difference"}


def compare_reports(old: Report, new: Report, *, names: tuple[str, str] = ("old", "new")) -> ReportDifference:
    """Compare two reports.

    Findings are the same where code, file and subjects are; lines and numbers may differ. What is suppressed or known
    in the newer report is not new, and not fixed either.

    Args:
        old: The older report.
        new: The newer one.
        names: What they are called.
    """
    before = [*old.findings, *(one.finding for one in old.accepted)]
    now = [*new.findings, *(one.finding for one in new.accepted)]
    known = marks(before)
    gone = not_found(before, now, ())
    looked = new.error is None and not new.not_made
    fixed = tuple(one for one in gone if looked and one.code not in new.ignored)
    notes = []
    if old.target != new.target:
        notes.append(f"they are of two targets: {old.target} and {new.target}")
    for name, report in zip(names, (old, new), strict=True):
        if report.error is not None:
            notes.append(f"{name} has stopped: {report.error.message}")
        elif report.not_made:
            notes.append(f"not every check of {name} was made: {report.shortfall or ', '.join(report.not_made)}")
    sizes = [report.world.get("world_size") for report in (old, new)]
    if sizes[0] != sizes[1]:
        notes.append(f"they were made on {sizes[0]} and {sizes[1]} ranks")
    return ReportDifference(
        *names,
        added=tuple(sorted((one for one in new.findings if not is_known(one, known)), key=Finding.sort_key)),
        fixed=fixed,
        remaining=tuple(sorted((one for one in now if is_known(one, known)), key=Finding.sort_key)),
        open=tuple(one for one in gone if one not in fixed),
        notes=tuple(notes),
        error=new.error,
    )
