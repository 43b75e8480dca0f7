"""`ddpcheck hang`: the verdict on a job that hung, from the dumps that Flight Recorder has left.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse

from ddpcheck.cli.output import ReportOutput
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_HANG
from ddpcheck.report.hang.hang_report import report_on_hang
from ddpcheck.report.settings import load_settings


def run_hang(arguments: argparse.Namespace) -> int:
    """Read the dumps, and show the report on them; 4 for a hang that was found."""
    settings = load_settings({name: getattr(arguments, name) for name in ("select", "ignore", "fail_on")})
    with ReportOutput(arguments, settings.format) as output:
        report = report_on_hang(
            arguments.folder, select=settings.select, ignore=settings.ignore, suppress=settings.suppress
        )
        output.show(report)
    return EXIT_HANG if report.exit_code(settings.fail_on) == EXIT_FINDINGS else EXIT_CLEAN
