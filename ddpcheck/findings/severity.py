"""Severities of findings."""

from __future__ import annotations

from enum import Enum


class Severity(Enum):
    """The severity of a finding.

    `ERROR`: training is wrong, or will stop. `WARNING`: fragile, slow, or probably not meant. `NOTE`: worth knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)

    def reaches(self, threshold: Severity) -> bool:
        """Whether this severity is at or above `threshold`."""
        return self.rank <= threshold.rank
