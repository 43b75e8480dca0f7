"""Rules: one defect, one permanent code, one text that every output shows."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.findings.severity import Severity

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


@dataclass(frozen=True, slots=True)
class Rule:
    """One documented defect.

    Attributes:
        code: Permanent: never given to another defect, never renumbered.
        name: In kebab-case; may be used wherever the code may.
        severity: What a finding has unless its detector knows better.
        summary: One sentence: what is the case.
        why: What DDP makes of it, and where that is documented.
        fix: What to do, as a command.
        detected: What is compared or watched, and what makes a finding of it.
        ignore: When it is no defect.
        reports: Public threads on it, as OWNER/REPOSITORY#NUMBER.
        example: A few lines of code that break the rule, with a comment on what would not.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    fix: str
    detected: str
    ignore: str
    reports: tuple[str, ...] = ()
    example: str = ""

    def sections(self) -> tuple[tuple[str, str], ...]:
        """The headings and texts that every output shows, in their order."""
        return (
            ("Why it matters", self.why),
            ("What to do", self.fix),
            ("How it is detected", self.detected),
            ("When to ignore it", self.ignore),
        )


def address_of(report: str) -> str:
    """The address of a public thread, OWNER/REPOSITORY#NUMBER."""
    repository, _, number = report.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
