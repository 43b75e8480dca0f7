"""`ddpcheck render`: a report or a matrix that was saved as JSON or as HTML.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse

from ddpcheck.cli.output import ReportOutput
from ddpcheck.cli.saved import load_saved
from ddpcheck.findings.errors import EXIT_CLEAN
from ddpcheck.render import FORMATS, MATRIX_FORMATS
from ddpcheck.report.matrix.matrix import Matrix
from ddpcheck.report.settings import load_settings


def run_render(arguments: argparse.Namespace) -> int:
    """Show a report or a matrix that was saved as JSON or as HTML."""
    report = load_saved(arguments.path)
    formats = MATRIX_FORMATS if isinstance(report, Matrix) else FORMATS
    arguments.command_line = ""  # that of the report is in it
    with ReportOutput(arguments, load_settings().format, formats) as output:
        output.show(report)
    return EXIT_CLEAN
