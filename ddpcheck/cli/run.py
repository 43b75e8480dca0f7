"""`ddpcheck run`: torchrun's own agent on the user's script, and a report when it has ended.

This module is light: it never imports torch before a script is run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from ddpcheck.cli.output import ReportOutput
from ddpcheck.findings.errors import EXIT_HANG
from ddpcheck.findings.report import Report
from ddpcheck.findings.severity import Severity
from ddpcheck.monitor.script.environment import RunOptions, environment_for
from ddpcheck.monitor.script.rank_log import read_logs
from ddpcheck.monitor.script.reporting.check_options import add_check_options, examine
from ddpcheck.monitor.script.reporting.ending import Ending
from ddpcheck.monitor.script.reporting.flight_records import prepare, write_flight_records
from ddpcheck.monitor.script.reporting.hang_watch import HangWatch, end_agent
from ddpcheck.monitor.script.reporting.script_report import report_on_script


def run_script(arguments: argparse.Namespace) -> int:
    """Run a script as torchrun does, and report on it; its own exit code, or 1 for findings where that is 0."""
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog = "ddpcheck run"
    add_check_options(parser)
    given = parser.parse_args(arguments.rest)
    given.command_line = arguments.command_line
    examine(given)
    if given.check_flight_recorder is not None:
        prepare(Path(given.check_flight_recorder))
    with tempfile.TemporaryDirectory(prefix="ddpcheck-run-") as folder, report_output(given) as output:
        options = RunOptions(folder, given.check_every)
        os.environ.update(environment_for(options, os.environ))
        ending = _run(run, given, Path(folder))
        script = shlex.join([given.training_script, *given.training_script_args])
        report = show_report(script, ending, Path(folder), given, output)
    fail_on = None if given.check_fail_on == "never" else Severity(given.check_fail_on)
    return ending.exit_code or report.exit_code(fail_on)


def report_output(given: argparse.Namespace) -> ReportOutput:
    """Where the report goes, by the options of the script's run."""
    given.output, given.format = given.check_output, given.check_format
    given.command_line = getattr(given, "command_line", "")
    return ReportOutput(given, None, to_stderr=True)


def show_report(script: str, ending: Ending, folder: Path, given: argparse.Namespace, output: ReportOutput) -> Report:
    """Show the report on a script that has ended; of a clean one a line, unless a form of the report was asked for."""
    ranks = read_logs(folder)
    if given.check_flight_recorder is not None:
        write_flight_records(Path(given.check_flight_recorder), ranks, ending)
    report = report_on_script(script, ending, ranks, select=given.check_select, ignore=given.check_ignore)
    if report.status == "clean" and given.check_output is None and given.check_format is None:
        print(f"ddpcheck: clean: {report.checks[0].detail}", file=sys.stderr)
    else:
        output.show(report)
    return report


def _run(run: Any, given: argparse.Namespace, folder: Path) -> Ending:
    """Run the script; its exit code is that of the rank that failed first; 128 and the signal, as in a shell."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    watch = HangWatch(folder, given.check_timeout, end_agent)
    try:
        run(given)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        return Ending(code, {rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        if watch.hang is not None:
            return Ending(EXIT_HANG, hang=watch.hang)
        print(f"ddpcheck run: {error}", file=sys.stderr)
        return Ending(128 + int(error.sigval), interrupted=True)
    finally:
        watch.stop()
    return Ending()
