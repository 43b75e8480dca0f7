"""`ddpcheck diff`: what is new, fixed and remaining between two saved reports.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse

from ddpcheck.cli.output import ReportOutput
from ddpcheck.cli.saved import load_report
from ddpcheck.findings.difference import compare_reports
from ddpcheck.findings.errors import UsageError
from ddpcheck.render import DIFFERENCE_FORMATS
from ddpcheck.report.settings import load_settings


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two saved reports; 1 where the newer one has a new finding at or above --fail-on."""
    settings = load_settings({"fail_on": arguments.fail_on})
    if arguments.old == arguments.new == "-":
        raise UsageError("only one of the two reports can come from standard input")
    names = (arguments.old, arguments.new)
    difference = compare_reports(load_report(arguments.old), load_report(arguments.new), names=names)
    default = settings.format if settings.format in DIFFERENCE_FORMATS else None
    with ReportOutput(arguments, default, DIFFERENCE_FORMATS) as output:
        output.show(difference)
    return difference.exit_code(settings.fail_on)
