"""`ddpcheck live`: what the ranks of a run do now, and what was found so far.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse

from ddpcheck.cli.output import ReportOutput
from ddpcheck.findings.errors import EXIT_HANG
from ddpcheck.report.settings import load_settings
from ddpcheck.run.live_report import report_on_run, the_run


def run_live(arguments: argparse.Namespace) -> int:
    """Show the report; 4 for ranks that wait for each other."""
    settings = load_settings({name: getattr(arguments, name) for name in ("select", "ignore", "fail_on")})
    folder = the_run(arguments.folder)
    with ReportOutput(arguments, settings.format) as output:
        report = report_on_run(folder, select=settings.select, ignore=settings.ignore, suppress=settings.suppress)
        output.show(report)
    return EXIT_HANG if report.checks[0].status == "error" else report.exit_code(settings.fail_on)
