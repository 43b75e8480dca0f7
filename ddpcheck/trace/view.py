"""Base classes of views: facts of one subject for the judges that declare it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.trace.script_facts import ScriptFacts


class NotRecorded(Exception):
    """Missing fact that a judge needs; the message is shown on a check line.

    Queries of views raise `NotRecorded`. The judge then has no result, and its check line is "not checked". If there
    are only too few steps to judge, do not raise `NotRecorded`: no fact is missing, and there is nothing to report.
    """


class View:
    """Facts of one subject of a script, requested by a judge's argument type (`rules.registry.rule`)."""

    __slots__ = ()
    checks: ClassVar[tuple[str, ...]]  # a finding belongs to the first check line that its rule names, else to the last
    needs_all_ranks: ClassVar[bool] = True  # if False, the view may lack the logs of some ranks

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        """Return the view of a script, or None without facts of the subject."""
        raise NotImplementedError

    @classmethod
    def check_of(cls, finding: Finding) -> str:
        """Return the check line of a finding."""
        return next((c for c in RULES[finding.code].checks.get("run", ()) if c in cls.checks), cls.checks[-1])

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterable[str]:
        """Yield texts of a passed check line: what was compared; raise `NotRecorded` if incomplete."""
        return ()


@dataclass(frozen=True, slots=True)
class ScriptView(View):
    """View of all facts of a script."""

    facts: ScriptFacts

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        return cls(facts)
