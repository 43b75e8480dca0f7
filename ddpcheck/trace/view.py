"""Base class of views: the facts of one subject, for the judges that declare it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from ddpcheck.findings.report import Finding
from ddpcheck.trace.script_facts import ScriptFacts


class View:
    """Facts of one subject of a script.

    A judge declares by the type of its argument which view it needs (`rules.registry.rule`). `check` is the check line
    of its findings.
    """

    __slots__ = ()
    check: ClassVar[str]
    needs_all_ranks: ClassVar[bool] = True

    @classmethod
    def of(cls, facts: ScriptFacts) -> Self | None:
        """Return the view of a script, or None if the script has nothing of the subject."""
        raise NotImplementedError

    def compared(self, findings: Sequence[Finding]) -> tuple[str, str]:
        """Return what was compared and matches, and why the comparison is incomplete; '' if neither."""
        del findings
        return "", ""
