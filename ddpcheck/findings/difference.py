"""Difference of two reports: new, fixed and remaining findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS
from ddpcheck.findings.report import Document, Finding, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.selection import is_known, marks, not_found


@dataclass(frozen=True, slots=True)
class ReportDifference(Document):
    """Difference between an older and a newer report.

    Attributes:
        old: Name of the older report.
        new: Name of the newer report.
        added: Findings of the newer report that are new, more severe than before, or about more subjects.
        fixed: Findings of the older report that the newer report checked for and did not find.
        remaining: Findings of both reports, as in the newer report.
        open: Findings missing in the newer report, if some checks were not made or the rule is ignored.
        notes: Sentences on why the two reports are hard to compare.
        error: Error of the newer report.
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
        """Number of new, fixed, remaining and open findings, in words."""
        findings_by_kind = {"new": self.added, "fixed": self.fixed, "remaining": self.remaining, "not known": self.open}
        counts = [f"{len(findings)} {kind}" for kind, findings in findings_by_kind.items() if findings]
        return ", ".join(counts) or "no findings in either report"

    def exit_code(self, fail_on: Severity | None = Severity.ERROR) -> int:
        """Return `error`'s exit code, or 1 if added findings reach `fail_on`, or 0."""
        if self.error is not None:
            return self.error.exit_code
        has_failed = fail_on is not None and any(finding.severity.reaches(fail_on) for finding in self.added)
        return EXIT_FINDINGS if has_failed else EXIT_CLEAN

    def to_dict(self) -> dict[str, Any]:
        return {**Document.to_dict(self), "kind": "difference"}


def compare_reports(old: Report, new: Report, *, names: tuple[str, str] = ("old", "new")) -> ReportDifference:
    """Compare two reports.

    Findings match by code, file and subjects; lines and numbers may differ. Findings that are suppressed or known in
    the newer report are neither added nor fixed.
    """
    old_findings = [*old.findings, *(accepted.finding for accepted in old.accepted)]
    new_findings = [*new.findings, *(accepted.finding for accepted in new.accepted)]
    known = marks(old_findings)
    missing = not_found(old_findings, new_findings, ())
    made_every_check = new.error is None and not new.not_made
    fixed = tuple(finding for finding in missing if made_every_check and finding.code not in new.ignored)
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
        added=tuple(sorted((item for item in new.findings if not is_known(item, known)), key=Finding.sort_key)),
        fixed=fixed,
        remaining=tuple(sorted((item for item in new_findings if is_known(item, known)), key=Finding.sort_key)),
        open=tuple(finding for finding in missing if finding not in fixed),
        notes=tuple(notes),
        error=new.error,
    )
