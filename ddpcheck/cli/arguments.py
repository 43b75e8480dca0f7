"""The commands and options of the command line.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from ddpcheck import __version__
from ddpcheck.cli.completion import SHELLS, run_completion
from ddpcheck.cli.diff import run_diff
from ddpcheck.cli.env import run_env
from ddpcheck.cli.examples import examples_of
from ddpcheck.cli.graph import run_graph
from ddpcheck.cli.hang import run_hang
from ddpcheck.cli.init import run_init
from ddpcheck.cli.launched import on_launched_ranks
from ddpcheck.cli.live import run_live
from ddpcheck.cli.parsing import HelpFormatter, Parser
from ddpcheck.cli.render import run_render
from ddpcheck.cli.report import run_report
from ddpcheck.cli.rules import run_explain, run_rules
from ddpcheck.cli.run import run_script
from ddpcheck.cli.schema import run_schema
from ddpcheck.findings.errors import EXIT_USAGE
from ddpcheck.render import DIFFERENCE_FORMATS, FORMATS

EPILOG = """\
exit codes: 0 no findings; 1 findings at or above --fail-on; 2 wrong usage or configuration, or a bug in ddpcheck;
3 the target could not be imported, built or run; 4 a hang or a deadline; 130 interrupted by Ctrl-C, 143 ended by
SIGTERM. Where torchrun, mpirun or srun has started several, rank 0 has this exit code and the others 0.
"""

TARGET_HELP = """\
a recipe: `pkg.module:attr`, `path/to/file.py:attr`, `pkg.module` or `path/to/file.py`. attr is a ddpcheck.Recipe, or a
function without arguments that returns one; without attr, the module has functions model, batch and loss
"""


def make_parser() -> Parser:
    """The parser of the command line; what it parses has `command`, a function of the arguments."""
    parser = Parser(
        prog="ddpcheck",
        description="Tells whether a model and its training loop are right under PyTorch DistributedDataParallel.",
        epilog=f"{examples_of('')}\n\n{EPILOG}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddpcheck {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=lambda arguments: _no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=examples_of(name),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        made.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        made.set_defaults(command=run, parser=made)
        return made

    _add_report(command("report", on_launched_ranks(run_report), "check a recipe on real processes, print a report"))
    script = commands.add_parser(
        "run", help="run a training script as torchrun does, and report on it", prefix_chars="\0", add_help=False
    )
    script.add_argument("rest", nargs=argparse.REMAINDER)
    script.set_defaults(command=run_script)
    _add_hang(command("hang", run_hang, "say where the ranks of a job that hangs part, by Flight Recorder"))
    _add_live(command("live", run_live, "say what the ranks of a `ddpcheck run` do now, and what was found so far"))
    _add_graph(command("graph", on_launched_ranks(run_graph), "check a recipe and draw its loss's graph, with faults"))
    _add_on_rules(command)
    _add_on_saved(command)
    init = command("init", run_init, "write a first recipe for a model, and check it")
    init.add_argument("model", metavar="MODEL", help="its class, as path/to/file.py:Class or pkg.module:Class")
    init.add_argument("--args", metavar="ARGS", default="", help="of its constructor, as Python writes them")
    where = "write there; beside the file of the model (default: check_FILE.py, or check_MODULE.py here)"
    init.add_argument("-o", "--output", metavar="FILE", help=where)
    init.add_argument("--force", action="store_true", help="overwrite the file, if it is there")
    environment = command("env", run_env, "show versions, devices and variables, for a report of a bug")
    environment.add_argument("--format", metavar="NAME", default="text", help="text (default) or json")
    shell = command("completion", lambda given: run_completion(given, make_parser), "print a completion script")
    shell.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))
    return parser


Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Adds a command: its name, what it runs, and what it does, in a few words."""


def _add_report(report: argparse.ArgumentParser) -> None:
    what = _add_target(report)
    _add_rules(what)
    what.add_argument(
        "--matrix",
        action="store_true",
        help="try the options of DistributedDataParallel: which are right, what they cost",
    )
    how = report.add_argument_group("output")
    _add_fail_on(how)
    how.add_argument(
        "--baseline",
        metavar="REPORT.json",
        help="an earlier report, saved as JSON: its findings are shown as known, and only new ones count",
    )
    _add_output(how)
    how.add_argument(
        "--repro",
        metavar="DIR",
        help="write a script there that shows the first finding under plain torchrun, without ddpcheck; overwrites "
        "what ddpcheck wrote there before, and nothing else",
    )


def _add_hang(hang: argparse.ArgumentParser) -> None:
    hang.add_argument(
        "folder",
        metavar="DIR",
        help="the folder with the dumps, one a rank, named with the rank at its end; or http://HOST:PORT of "
        "torch's debug server (torch.distributed.debug.start_debug_server) in a job that runs",
    )
    _add_rules(hang)
    _add_fail_on(hang)
    _add_output(hang)


def _add_live(live: argparse.ArgumentParser) -> None:
    where = "the folder of the run (ddpcheck-run-... in the directory for temporary files); default: your only run here"
    live.add_argument("folder", metavar="DIR", nargs="?", help=where)
    _add_rules(live)
    _add_fail_on(live)
    _add_output(live)


def _add_graph(graph: argparse.ArgumentParser) -> None:
    how = _add_target(graph)
    how.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="FILE.dot, FILE.svg or FILE.png; without it, dot source to standard output",
    )


def _add_on_rules(command: Command) -> None:
    explain = command("explain", run_explain, "say what a rule means, why it matters and what to do")
    explain.add_argument("rules", metavar="RULE", nargs="+", help="a code, the beginning of one, or a name")
    listing = command("rules", run_rules, "list all rules")
    listing.add_argument("--format", metavar="NAME", default="text", help="text (default) or json")


def _add_on_saved(command: Command) -> None:
    render = command("render", run_render, "show a report that was saved as JSON or as HTML")
    render.add_argument("path", metavar="REPORT", help="the file, or - for standard input")
    _add_output(render)
    diff = command("diff", run_diff, "say what is new, fixed and remaining between two saved reports")
    diff.add_argument("old", metavar="OLD.json", help="a report that was saved as JSON, or - for standard input")
    diff.add_argument("new", metavar="NEW.json", help="a later one of the same target")
    _add_fail_on(diff)
    _add_output(diff, DIFFERENCE_FORMATS)
    schema = command("schema", run_schema, "print the JSON Schema of what ddpcheck saves")
    which = "report (default), matrix or difference"
    schema.add_argument("document", metavar="DOCUMENT", nargs="?", default="report", help=which)


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


def _add_output(parser: argparse._ActionsContainer, formats: Iterable[str] = FORMATS) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")
    names = ", ".join(formats)
    parser.add_argument("--format", metavar="NAME", help=f"{names} (default: by the extension of FILE, else text)")


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE
