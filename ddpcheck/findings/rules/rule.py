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
        example: A few lines of code that break the rule, with a comment on what would not.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    fix: str
    example: str = ""
