"""`ddpcheck hang`: the verdict on a job that hangs, from dumps of Flight Recorder, or from torch's debug server.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse

from ddpcheck.cli.output import ReportOutput
from ddpcheck.findings.errors import EXIT_FINDINGS, EXIT_HANG
from ddpcheck.report.hang.hang_report import report_on_hang
from ddpcheck.report.settings import load_settings


def run_hang(arguments: argparse.Namespace) -> int:
    """Show the report on the dumps, or on the job that runs; 4 for a hang that was found."""
    settings = load_settings({name: getattr(arguments, name) for name in ("select", "ignore", "fail_on")})
    with ReportOutput(arguments, settings.format) as output:
        report = report_on_hang(
            arguments.folder, select=settings.select, ignore=settings.ignore, suppress=settings.suppress
        )
        output.show(report)
    code = report.exit_code(settings.fail_on)
    return EXIT_HANG if code == EXIT_FINDINGS else code
