"""`ddpcheck run`: torchrun's own agent on the user's script, and a report when it has ended.

This module is light: it never imports torch before a script is run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.cli.agent import run_agent
from ddpcheck.cli.examples import examples_of
from ddpcheck.cli.nodes import collected, hand_over
from ddpcheck.cli.output import ReportOutput, complain, complain_of, say
from ddpcheck.cli.parsing import HelpFormatter, Parser, near_option
from ddpcheck.cli.saved import load_report
from ddpcheck.cli.torchrun_options import examine_options
from ddpcheck.findings.errors import EXIT_USAGE
from ddpcheck.findings.report import Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.severity import Severity
from ddpcheck.record.rank.environment import RunOptions, environment_for
from ddpcheck.report.settings import load_settings
from ddpcheck.run.check_options import add_check_options, examine, split_at_script
from ddpcheck.run.ending import Ending
from ddpcheck.run.flight_records import prepare, write_flight_records
from ddpcheck.run.node_link import NodeLink
from ddpcheck.stream.watched_rank import FOLDER, SCRIPT, read_logs

_AHEAD = 0.5  # seconds after which the agent has started the ranks, which take longer to import torch


def run_script(arguments: argparse.Namespace) -> int:
    """Run a script as torchrun does, and report on it; its own exit code, or 1 for findings where that is 0."""
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog, parser.epilog, parser.formatter_class = "ddpcheck run", examples_of("run"), HelpFormatter
    add_check_options(parser)
    parser.error = Parser.error.__get__(parser)  # type: ignore[method-assign]
    options, script = split_at_script(parser, arguments.rest)
    given, unknown = parser.parse_known_args([*options, *(script[:1] or [""])])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near_option(parser, unknown)}")
    if not script:
        parser.error("there is no script to run, as in `ddpcheck run --standalone --nproc-per-node 2 train.py`")
    given.training_script_args = script[1:]
    given.command_line = arguments.command_line
    given.debug = arguments.debug = arguments.debug or given.debug
    examine(given)
    examine_options(given)
    accepted = Accepted.of(given)
    if given.check_flight_recorder is not None:
        prepare(Path(given.check_flight_recorder))
    made = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
    with made as folder, report_output(given) as output:
        Path(folder, SCRIPT).write_text(shlex.join(script))
        os.environ.update(environment_for(RunOptions(folder, given.check_every), os.environ))
        nodes = NodeLink(Path(folder))
        ahead = threading.Timer(_AHEAD, _import_report)
        ahead.daemon = True
        ahead.start()
        ending = run_agent(run, given, Path(folder), nodes)
        ahead.cancel()
        if (exit_code := hand_over(nodes, ending)) is not None:
            return exit_code
        ending, exit_code = collected(nodes, ending), EXIT_USAGE
        try:
            report = show_report(shlex.join(script), ending, Path(folder), given, output, accepted)
            fail_on = None if given.check_fail_on == "never" else Severity(given.check_fail_on)
            exit_code = ending.exit_code or report.exit_code(fail_on)
        except Exception as error:
            if given.debug or not ending.exit_code:
                raise
            complain_of(error)
            exit_code = ending.exit_code
        finally:
            nodes.finish(exit_code)
    return exit_code


def _import_report() -> None:
    """Import what makes the report while the ranks run and this process has nothing else to do."""
    from ddpcheck.run import script_report  # noqa: F401


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
    from ddpcheck.run.script_report import report_on_script

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
    if given.check_output is None and given.check_format is None and (report.status == "clean" or not ranks):
        for note in report.world.get("notes", ()):
            complain(note, kind="note")
        say(f"clean: {report.checks[0].detail}" if report.status == "clean" else report.checks[-1].detail)
    else:
        output.show(report)
    return report
