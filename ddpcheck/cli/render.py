"""`ddpcheck render`: a report or a matrix that was saved as JSON or as HTML.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddpcheck.cli.output import ReportOutput, reason_of
from ddpcheck.findings.errors import EXIT_CLEAN, UsageError
from ddpcheck.findings.from_json import IncompleteError
from ddpcheck.findings.report import Report
from ddpcheck.render import FORMATS, MATRIX_FORMATS
from ddpcheck.render.page.frame import data_in
from ddpcheck.report.matrix.matrix import Matrix, is_matrix
from ddpcheck.report.settings import load_settings


def run_render(arguments: argparse.Namespace) -> int:
    """Show a report or a matrix that was saved as JSON or as HTML."""
    name = "standard input" if arguments.path == "-" else arguments.path
    try:
        text = _standard_input() if arguments.path == "-" else Path(arguments.path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {reason_of(error)}") from error
    try:
        text = data_in(text) or text
    except ValueError as error:
        raise UsageError(f"{name} is not a report: {error}") from error
    saved: type[Report] | type[Matrix] = Matrix if is_matrix(text) else Report
    try:
        report = saved.from_json(text)
    except IncompleteError as error:
        raise UsageError(f"{name} is not a complete report: {error}") from error
    except ValueError as error:
        raise UsageError(f"{name} is not a report: {error}") from error
    arguments.command_line = ""  # that of the report is in it
    with ReportOutput(arguments, load_settings().format, MATRIX_FORMATS if saved is Matrix else FORMATS) as output:
        output.show(report)
    return EXIT_CLEAN


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    return sys.stdin.read()
