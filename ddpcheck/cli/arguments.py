"""The commands and options of the command line.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from ddpcheck import __version__
from ddpcheck.cli.graph import run_graph
from ddpcheck.cli.hang import run_hang
from ddpcheck.cli.launched import on_launched_ranks
from ddpcheck.cli.output import complain
from ddpcheck.cli.render import run_render
from ddpcheck.cli.report import run_report
from ddpcheck.cli.rules import run_explain, run_rules
from ddpcheck.cli.run import run_script
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_USAGE
from ddpcheck.render import FORMATS

EPILOG = """\
exit codes: 0 no findings; 1 findings at or above --fail-on; 2 wrong usage or configuration, or a bug in ddpcheck;
3 the target could not be imported, built or run; 4 a hang or a deadline; 130 interrupted by Ctrl-C, 143 ended by
SIGTERM. Where torchrun, mpirun or srun has started several, rank 0 has this exit code and the others 0.
"""

TARGET_HELP = """\
a recipe: `pkg.module:attr`, `path/to/file.py:attr`, `pkg.module` or `path/to/file.py`. attr is a ddpcheck.Recipe, or a
function without arguments that returns one; without attr, the module has functions model, batch and loss
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; what it parses has `command`, a function of the arguments."""
    parser = _Parser(
        prog="ddpcheck",
        description="Tells whether a model and its training loop are right under PyTorch DistributedDataParallel.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddpcheck {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=lambda arguments: _no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        made.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        made.set_defaults(command=run)
        return made

    report = command("report", on_launched_ranks(run_report), "check a recipe on real processes and print a report")
    what = _add_target(report)
    _add_rules(what)
    what.add_argument(
        "--matrix",
        action="store_true",
        help="try the options of DistributedDataParallel: which are right, what they cost",
    )
    how = report.add_argument_group("output")
    _add_fail_on(how)
    _add_output(how)
    how.add_argument(
        "--repro",
        metavar="DIR",
        help="write a script there that shows the first finding under plain torchrun, without ddpcheck; overwrites "
        "what ddpcheck wrote there before, and nothing else",
    )

    script = commands.add_parser(
        "run", help="run a training script as torchrun does, and report on it", prefix_chars="\0", add_help=False
    )
    script.add_argument("rest", nargs=argparse.REMAINDER)
    script.set_defaults(command=run_script)

    hang = command("hang", run_hang, "say where the ranks of a job that hung part, by their Flight Recorder dumps")
    hang.add_argument(
        "folder", metavar="DIR", help="the folder with the dumps, one a rank, named with the rank at its end"
    )
    _add_rules(hang)
    _add_fail_on(hang)
    _add_output(hang)

    graph = command(
        "graph",
        on_launched_ranks(run_graph),
        "check a recipe and draw its loss's graph, with anomalous parameters in colour",
    )
    how = _add_target(graph)
    how.add_argument("--detail", default="auto", metavar="NAME", help="operations, modules or auto (by size; default)")
    how.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="FILE.dot, FILE.svg or FILE.png; without it, dot source to standard output",
    )

    explain = command("explain", run_explain, "say what a rule means, why it matters and what to do")
    explain.add_argument("rules", metavar="RULE", nargs="+", help="a code, the beginning of one, or a name")

    listing = command("rules", run_rules, "list all rules")
    listing.add_argument("--format", metavar="NAME", default="text", help="text (default) or json")

    render = command("render", run_render, "show a report that was saved as JSON")
    render.add_argument("path", metavar="REPORT.json", help="the file, or - for standard input")
    _add_output(render)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    what = parser.add_argument_group("what is checked")
    what.add_argument("--steps", metavar="N", help="training steps (default 3)")
    what.add_argument("--world-size", metavar="N", help="ranks (default 2)")
    what.add_argument("--backend", metavar="NAME", help="gloo or nccl (default: by device)")
    what.add_argument("--device", metavar="NAME", help="cpu or cuda (default cpu)")
    what.add_argument("--timeout", metavar="SECONDS", help="after which a run counts as a hang (default 30)")
    what.add_argument("--seed", metavar="N", help="of all random numbers (default 0)")
    what.add_argument(
        "--launcher",
        metavar="WHEN",
        help="whether to run on ranks that torchrun, mpirun or srun has started: auto (default), on or off",
    )
    modules = "modules that every rank needs, imported once before ranks are forked; comma separated or repeated"
    what.add_argument("--preload", metavar="MODULES", action="append", help=modules)
    return what


def _add_rules(parser: argparse._ActionsContainer) -> None:
    rules = "rules by code, prefix or name; comma separated or repeated"
    parser.add_argument("--select", metavar="RULES", action="append", help=f"report only these {rules}")
    parser.add_argument("--ignore", metavar="RULES", action="append", help=f"do not report these {rules}")


def _add_fail_on(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--fail-on", metavar="SEVERITY", help="error, warning, note or never (default error)")


def _add_output(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")
    names = ", ".join(FORMATS)
    parser.add_argument("--format", metavar="NAME", help=f"{names} (default: by the extension of FILE, else text)")


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, as all errors of ddpcheck are."""

    def error(self, message: str) -> NoReturn:
        from ddpcheck.worlds.launchers.detection import BY_HAND, detect

        launch = detect()
        if launch is not None and launch.rank and launch.launcher != BY_HAND:
            raise SystemExit(EXIT_CLEAN)  # rank 0 has been given the same, and says so
        complain(f"{message} (see `{self.prog} --help`)")
        raise SystemExit(EXIT_USAGE)
