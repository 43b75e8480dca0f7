"""`ddpcheck run`: torchrun's own agent on the user's script, and a report when it has ended.

This module is light: it never imports torch before a script is run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.cli.examples import examples_of
from ddpcheck.cli.output import ReportOutput, complain, say
from ddpcheck.cli.parsing import HelpFormatter, Parser, near_option
from ddpcheck.cli.saved import load_report
from ddpcheck.findings.errors import EXIT_HANG
from ddpcheck.findings.report import Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.severity import Severity
from ddpcheck.monitor.script.environment import RunOptions, environment_for
from ddpcheck.monitor.script.rank_log import read_logs
from ddpcheck.monitor.script.reporting.check_options import add_check_options, examine
from ddpcheck.monitor.script.reporting.ending import Ending
from ddpcheck.monitor.script.reporting.flight_records import prepare, write_flight_records
from ddpcheck.monitor.script.reporting.hang_watch import HangWatch, end_agent
from ddpcheck.monitor.script.reporting.script_report import report_on_script
from ddpcheck.report.settings import load_settings


def run_script(arguments: argparse.Namespace) -> int:
    """Run a script as torchrun does, and report on it; its own exit code, or 1 for findings where that is 0."""
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog, parser.epilog, parser.formatter_class = "ddpcheck run", examples_of("run"), HelpFormatter
    add_check_options(parser)
    parser.error = Parser.error.__get__(parser)  # type: ignore[method-assign]
    given, unknown = parser.parse_known_args(arguments.rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near_option(parser, unknown)}")
    given.command_line = arguments.command_line
    examine(given)
    accepted = Accepted.of(given)
    if given.check_flight_recorder is not None:
        prepare(Path(given.check_flight_recorder))
    with tempfile.TemporaryDirectory(prefix="ddpcheck-run-") as folder, report_output(given) as output:
        options = RunOptions(folder, given.check_every)
        os.environ.update(environment_for(options, os.environ))
        ending = _run(run, given, Path(folder))
        script = shlex.join([given.training_script, *given.training_script_args])
        report = show_report(script, ending, Path(folder), given, output, accepted)
    fail_on = None if given.check_fail_on == "never" else Severity(given.check_fail_on)
    return ending.exit_code or report.exit_code(fail_on)


def report_output(given: argparse.Namespace) -> ReportOutput:
    """Where the report goes, by the options of the script's run."""
    given.output, given.format = given.check_output, given.check_format
    return ReportOutput(given, None, to_stderr=True)


@dataclass(frozen=True, slots=True)
class Accepted:
    """What does not count: suppressed in pyproject.toml, or known from a baseline."""

    suppress: tuple[Suppression, ...] = ()
    baseline: Report | None = None

    @classmethod
    def of(cls, given: argparse.Namespace) -> Accepted:
        """Read it.

        Raises:
            ConfigError: pyproject.toml is wrong.
            UsageError: The baseline is no report.
        """
        known = None if given.check_baseline is None else load_report(given.check_baseline)
        return cls(load_settings().suppress, known)


def show_report(
    script: str, ending: Ending, folder: Path, given: argparse.Namespace, output: ReportOutput, accepted: Accepted
) -> Report:
    """Show the report on a script that has ended; of a clean one a line, unless a form of the report was asked for."""
    ranks = read_logs(folder)
    if given.check_flight_recorder is not None:
        write_flight_records(Path(given.check_flight_recorder), ranks, ending)
    report = report_on_script(
        script,
        ending,
        ranks,
        select=given.check_select,
        ignore=given.check_ignore,
        suppress=accepted.suppress,
        baseline=accepted.baseline,
    )
    if report.status == "clean" and given.check_output is None and given.check_format is None:
        for note in report.world.get("notes", ()):
            complain(note, kind="note")
        say(f"clean: {report.checks[0].detail}")
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
