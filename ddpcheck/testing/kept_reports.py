"""The reports of failed tests as HTML pages in a folder: `--ddp-report DIR`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Report

REPORT_FOLDER = "--ddp-report"
_LONGEST = 150


class ReportFolder:
    """Where the reports of one test go."""

    def __init__(self, folder: str | None, test: str) -> None:
        """Name the folder, if there is to be one, and the test by its node id."""
        self._folder = None if folder is None else Path(folder)
        self._test = test
        self._written = 0

    def keep(self, report: Report) -> Path | None:
        """Write a report; returns its file, or `None` where none are kept.

        Raises:
            UsageError: It cannot be written.
        """
        if self._folder is None:
            return None
        from ddpcheck.render import renderer_for

        self._written += 1
        path = self._folder / f"{file_name(self._test)}{f'-{self._written}' if self._written > 1 else ''}.html"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(renderer_for("html").render(report), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        return path


def file_name(test: str) -> str:
    """A name for the file of a test, another for each; what files cannot be called is replaced."""
    place, bracket, parameters = test.partition("[")
    plain = place.replace("::", ".").replace("/", ".") + bracket + parameters
    name = re.sub(r"[^\w.\[\]=-]+", "-", plain)[-_LONGEST:]
    return name if name == plain else f"{name}-{hashlib.blake2b(test.encode(), digest_size=4).hexdigest()}"
