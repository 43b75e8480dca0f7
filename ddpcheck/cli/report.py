"""`ddpcheck report`, with --matrix and --repro.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.cli.output import Progress, ReportOutput, say
from ddpcheck.cli.saved import load_report
from ddpcheck.cli.settings import CHECK_SETTINGS, command_settings
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import RULES
from ddpcheck.render import FORMATS, MATRIX_FORMATS
from ddpcheck.report.matrix.matrix import Matrix
from ddpcheck.report.repro import command_for, demonstration_for, prepare, write_reproduction

if TYPE_CHECKING:
    from ddpcheck.harness import RankHosts


def run_report(arguments: argparse.Namespace, hosts: RankHosts | None) -> int:
    """Check a recipe, or its matrix, show the report, and reproduce its first finding where that is asked for."""
    if arguments.matrix and arguments.repro is not None:
        raise UsageError("--repro writes the first finding of a report; run it without --matrix")
    if arguments.matrix and arguments.baseline is not None:
        raise UsageError("--baseline is for the findings of a report; run it without --matrix")
    settings = command_settings(arguments, (*CHECK_SETTINGS, "fail_on"), hosts)
    known = {} if arguments.baseline is None else {"baseline": load_report(arguments.baseline)}
    with (
        ReportOutput(arguments, settings.format, MATRIX_FORMATS if arguments.matrix else FORMATS) as output,
        ReproductionFolder(arguments.repro) as reproduction,
        Progress(sys.stderr) as progress,
    ):
        run: Callable[..., Report | Matrix]
        if arguments.matrix:  # the rest of the house, only when there is work to do
            from ddpcheck.report.matrix.check_matrix import check_matrix as run
        else:
            from ddpcheck.report.checking.check import check as run
        asked = {name: getattr(settings, name) for name in CHECK_SETTINGS}
        report = run(arguments.target, progress=progress, hosts=hosts, **asked, **known)
        progress.clear()
        output.show(report)
        if isinstance(report, Report):
            reproduction.write(report, arguments.target, progress)
    return report.exit_code(settings.fail_on)


class ReproductionFolder:
    """Where a reproduction goes. Entering finds out whether that can be written, before any work is done."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._made = False

    def __enter__(self) -> ReproductionFolder:
        if self._folder is not None:
            self._made = prepare(self._folder)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None and self._made:
            with contextlib.suppress(OSError):  # not empty: something was written
                self._folder.rmdir()

    def write(self, report: Report, target: str, progress: Progress) -> None:
        if self._folder is None:
            return
        if not report.findings:
            say(f"no finding to reproduce, nothing written to {self._folder}")
            return
        first = report.findings[0]
        if demonstration_for(first) is None:
            what = f"{first.code} ({RULES[first.code].name})"
            say(f"no script shows {what}, nothing written to {self._folder}")
            return
        progress("writing a reproduction")
        script = write_reproduction(report, target, self._folder)
        progress.clear()
        command = command_for(report, script)
        print(f"ddpcheck: wrote {script}; run it with: {command}", file=sys.stderr)  # unbroken, to be copied
