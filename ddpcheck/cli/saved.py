"""Reports and matrices that were saved as JSON or as HTML.

This module is light: it never imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ddpcheck.cli.output import reason_of
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.from_json import IncompleteError
from ddpcheck.findings.report import Report
from ddpcheck.render.page.data import data_in
from ddpcheck.report.matrix.matrix import Matrix, is_matrix


def load_saved(path: str) -> Report | Matrix:
    """The report or the matrix in a file; "-" stands for standard input.

    Raises:
        UsageError: The file cannot be read, or is neither.
    """
    name = "standard input" if path == "-" else path
    try:
        text = _standard_input() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {name}: {reason_of(error)}") from error
    try:
        text = data_in(text) or text
        saved: type[Report] | type[Matrix] = Matrix if is_matrix(text) else Report
        return saved.from_json(text)
    except IncompleteError as error:
        raise UsageError(f"{name} is not a complete report: {error}") from error
    except ValueError as error:
        raise UsageError(f"{name} is not a report: {error}") from error


def load_report(path: str) -> Report:
    """The report in a file.

    Raises:
        UsageError: The file cannot be read, or has no report.
    """
    report = load_saved(path)
    if isinstance(report, Matrix):
        raise UsageError(f"{path} is a matrix, not a report; save one with `ddpcheck report TARGET -o FILE.json`")
    return report


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    return sys.stdin.read()
