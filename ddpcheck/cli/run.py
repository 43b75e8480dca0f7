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
from ddpcheck.findings.errors import EXIT_HANG, UsageError
from ddpcheck.findings.severity import Severity
from ddpcheck.monitor.script.ending import Ending
from ddpcheck.monitor.script.environment import RunOptions, environment_for
from ddpcheck.monitor.script.flight_records import prepare, write_flight_records
from ddpcheck.monitor.script.hang_watch import HangWatch, end_agent
from ddpcheck.monitor.script.rank_log import read_logs
from ddpcheck.monitor.script.script_report import report_on_script


def run_script(arguments: argparse.Namespace) -> int:
    """Run a script as torchrun does, and report on it; its own exit code, or 1 for findings where that is 0."""
    from torch.distributed.run import get_args_parser, run

    given = _with_own_options(get_args_parser()).parse_args(arguments.rest)
    if given.check_every < 0:
        raise UsageError(f"--check-every is a number of steps, or 0 for never, not {given.check_every}")
    if not 0 < given.check_timeout < float("inf"):
        raise UsageError(f"--check-timeout is a number of seconds above 0, not {given.check_timeout:g}")
    if given.check_flight_recorder is not None:
        prepare(Path(given.check_flight_recorder))
    given.output, given.format = given.check_output, given.check_format
    with (
        tempfile.TemporaryDirectory(prefix="ddpcheck-run-") as folder,
        ReportOutput(given, None, to_stderr=True) as output,
    ):
        options = RunOptions(folder, given.check_every)
        os.environ.update(environment_for(options, os.environ))
        ending = _run(run, given, Path(folder))
        script = shlex.join([given.training_script, *given.training_script_args])
        ranks = read_logs(Path(folder))
        if given.check_flight_recorder is not None:
            write_flight_records(Path(given.check_flight_recorder), ranks, ending)
        report = report_on_script(script, ending, ranks, select=given.check_select, ignore=given.check_ignore)
        if report.status == "clean" and given.check_output is None and given.check_format is None:
            print(f"ddpcheck: clean: {report.checks[0].detail}", file=sys.stderr)
        else:
            output.show(report)
    fail_on = None if given.check_fail_on == "never" else Severity(given.check_fail_on)
    return ending.exit_code or report.exit_code(fail_on)


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
        return Ending(128 + int(error.sigval))
    finally:
        watch.stop()
    return Ending()


def _with_own_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    rules = "by code, prefix or name; may be repeated"
    parser.prog = "ddpcheck run"
    add = parser.add_argument_group("ddpcheck").add_argument
    add("--check-every", type=int, default=10, metavar="N", help="compare the ranks every N steps (default 10)")
    timeout = "end a script whose ranks wait for each other and make no progress for so long (default 60)"
    add("--check-timeout", type=float, default=60.0, metavar="SECONDS", help=timeout)
    add("--check-select", action="append", default=[], metavar="RULES", help=f"report only these rules, {rules}")
    add("--check-ignore", action="append", default=[], metavar="RULES", help=f"do not report these rules, {rules}")
    levels = ["error", "warning", "note", "never"]
    add("--check-fail-on", default="error", choices=levels, help="exit with 1 from this severity on (default error)")
    add("--check-output", metavar="FILE", help="write the report there, and not to standard error")
    dumps = "write the last collectives of each rank into this folder, as Flight Recorder's dumps (see ddpcheck hang)"
    add("--check-flight-recorder", metavar="DIR", help=dumps)
    add("--check-format", metavar="FORMAT", help="of the report; by the suffix of the file where there is one")
    return parser
