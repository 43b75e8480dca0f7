"""The report as JSON, for machines and for `ddpcheck render`.

This module is light: it never imports torch.
"""

from __future__ import annotations

from ddpcheck.findings.report import Report
from ddpcheck.render import Medium
from ddpcheck.report.matrix.matrix import Matrix


class JsonRenderer:
    """Writes what `Report.from_json` or `Matrix.from_json` reads."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def render(self, report: Report | Matrix) -> str:
        """The report as JSON with sorted keys; characters that the medium cannot show are escaped as JSON does."""
        text = report.to_json()
        if not self._medium.shows(text):
            text = "".join(c if ord(c) < 128 else _escaped(c) for c in text)
        return text + "\n"


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
