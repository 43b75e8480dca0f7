"""Commands and options of the command line."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpcheck import __version__
from ddpcheck.cli.checks import run_graph, run_hang, run_init, run_live, run_report
from ddpcheck.cli.env import run_env, version_of
from ddpcheck.cli.launched import on_launched_ranks
from ddpcheck.cli.output import print_out
from ddpcheck.cli.parsing import HelpFormatter, Parser, examples_of
from ddpcheck.cli.rule_examples import run_test_rule
from ddpcheck.cli.rules import run_explain, run_rules
from ddpcheck.cli.saved import DOCUMENTS, run_diff, run_render, run_schema
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_USAGE, UsageError
from ddpcheck.findings.rules import FAMILIES, RULES
from ddpcheck.render import DIFFERENCE_FORMATS, FORMATS
from ddpcheck.report.settings import load_third_party_rules
from ddpcheck.run.check_options import StoreOnce, add_check_options, add_display_options

EPILOG = """\
exit codes: 0 no findings at or above --fail-on; 1 such findings; 2 wrong usage or configuration, or a bug in ddpcheck;
3 the target could not be imported, built or run; 4 a hang or a deadline; 130 interrupted by Ctrl-C, 143 ended by
SIGTERM. Under torchrun, mpirun or srun, rank 0 exits with this code, and the other ranks with 0.
"""

TARGET_HELP = """\
a recipe: `pkg.module:attr`, `path/to/file.py:attr`, `pkg.module` or `path/to/file.py`. attr is a ddpcheck.Recipe, or a
function without arguments that returns one; without attr, the module has functions model, batch and loss
"""

_RULES = "rules by code, prefix or name; comma separated or repeated"
OPTIONS: Mapping[str, tuple[str, str]] = {  # option -> (metavar, help)
    "--steps": ("N", "training steps (default 3)"),
    "--world-size": ("N", "ranks (default 2)"),
    "--backend": ("NAME", "gloo or nccl (default: by device)"),
    "--device": ("NAME", "cpu or cuda (default cpu)"),
    "--timeout": ("SECONDS", "report a hang after SECONDS (default 30)"),
    "--seed": ("N", "seed of all random numbers (default 0)"),
    "--launcher": ("WHEN", "run on the ranks that torchrun, mpirun or srun has started: auto (default), on or off"),
    "--preload": ("MODULES", "modules to import once, before ranks are forked; comma separated or repeated"),
    "--select": ("RULES", f"report only these {_RULES}"),
    "--ignore": ("RULES", f"do not report these {_RULES}"),
    "--fail-on": ("SEVERITY", "error, warning, note or never (default error)"),
    "--baseline": (
        "REPORT.json",
        "an earlier report, saved as JSON: its findings are shown as known, and only new ones count",
    ),
    "--output": ("FILE", "write to FILE instead of standard output"),
    "--format": ("NAME", "{formats} (default: by the extension of FILE, else text)"),
    "--repro": (
        "DIR",
        "write a script to DIR that shows the first finding under plain torchrun, without ddpcheck; overwrites only "
        "files that ddpcheck wrote there before",
    ),
}
_OF_A_CHECK = ("--steps", "--world-size", "--backend", "--device", "--timeout", "--seed", "--launcher", "--preload")
_REPEATED = ("--preload", "--select", "--ignore")

_SHELLS = ("bash", "zsh", "fish")
_COMPLETIONS: Mapping[str, Sequence[str]] = {  # name of an option or argument -> values to complete
    "backend": ("gloo", "nccl"),
    "device": ("cpu", "cuda"),
    "launcher": ("auto", "on", "off"),
    "fail_on": ("error", "warning", "note", "never"),
    "format": tuple(FORMATS),
}
_OF_RULES = frozenset({"select", "ignore", "rules"})
_FILES = frozenset({"target", "file", "model", "output", "baseline", "path", "old", "new", "training_script"})
_FOLDERS = frozenset({"folder", "repro", "flight_recorder", "log_dir"})


def _run_script(arguments: argparse.Namespace) -> int:
    from ddpcheck.cli.run import run_script  # imports all judges of `run`

    return run_script(arguments)


def make_parser() -> Parser:
    """Return the command-line parser, which stores the function to call in `arguments.command`."""
    parser = Parser(
        prog="ddpcheck",
        description="Checks that a model and its training loop are correct under PyTorch DistributedDataParallel.",
        epilog=f"{examples_of('')}\n\n{EPILOG}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    torch = f"torch {version}" if (version := version_of("torch")) else "no torch"
    versions = f"ddpcheck {__version__} ({torch}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions)
    debug = "show the traceback of an error"
    parser.add_argument("--debug", action="store_true", help=debug)

    def no_command(_arguments: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return EXIT_USAGE

    parser.set_defaults(command=no_command)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        description = text[0].upper() + text[1:] + "."
        options: Any = {"formatter_class": HelpFormatter, "allow_abbrev": False}
        command = commands.add_parser(name, help=text, description=description, epilog=examples_of(name), **options)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug)
        command.set_defaults(command=run, parser=command)
        return command

    _add_report(add)
    script = commands.add_parser(
        "run", help="run a training script as torchrun does, and report on it", prefix_chars="\0", add_help=False
    )
    script.add_argument("rest", nargs=argparse.REMAINDER)
    script.set_defaults(command=_run_script)
    _add_hang_and_graph(add)
    _add_documents(add)
    _add_tools(add)
    return parser


_AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
_TEXT_OR_JSON: Any = {
    "choices": ("text", "json"),
    "default": "text",
    "help": "text (default) or json",
    "metavar": "NAME",
}


def _add_report(add: _AddCommand) -> None:
    report = add("report", on_launched_ranks(run_report), "check a recipe on real processes, and print a report")
    group = _add_target(report)
    _add_settings(group, "--select", "--ignore")
    matrix = "try the options of DistributedDataParallel: which are correct, and what they cost"
    group.add_argument("--matrix", action="store_true", help=matrix)
    schedule = "simulate RANKS ranks, one by one, and compare their collectives"
    group.add_argument("--schedule", type=int, metavar="RANKS", help=schedule)
    _add_settings(report.add_argument_group("output"), "--fail-on", "--baseline", "--output", "--format", "--repro")


def _add_hang_and_graph(add: _AddCommand) -> None:
    hang = add("hang", run_hang, "find where the ranks of a hung job diverge (Flight Recorder dumps)")
    dumps = (
        "the folder of the dumps, one per rank, whose names end in the rank; or http://HOST:PORT of torch's debug "
        "server (torch.distributed.debug.start_debug_server) in a running job"
    )
    hang.add_argument("folder", metavar="DIR", help=dumps)
    _add_settings(hang, "--select", "--ignore", "--fail-on", "--output", "--format")
    live = add("live", run_live, "show the state of the ranks of an active `ddpcheck run`, and the findings so far")
    where = "the folder of the run (ddpcheck-run-... in the temporary folder); default: your only active run"
    live.add_argument("folder", metavar="DIR", nargs="?", help=where)
    _add_settings(live, "--select", "--ignore", "--fail-on", "--output", "--format")
    graph = add("graph", on_launched_ranks(run_graph), "check a recipe, and draw the graph of its loss")
    picture = "FILE.dot, FILE.svg or FILE.png; without it, dot source to standard output"
    graph_group = _add_target(graph)
    graph_group.add_argument("-o", "--output", metavar="FILE", help=picture)
    views = "modules (default), or autograd: the loss's autograd graph, drawn by torchviz"
    graph_group.add_argument("--view", choices=("modules", "autograd"), default="modules", metavar="NAME", help=views)


def _add_documents(add: _AddCommand) -> None:
    explain = add("explain", run_explain, "explain a rule: what it means, why it matters, how to fix it")
    explain.add_argument("rules", metavar="RULE", nargs="+", help="a code, a prefix of codes, or a name")
    rules = add("rules", run_rules, "list all rules")
    rules.add_argument("--format", **_TEXT_OR_JSON)
    test_rule = add("test-rule", run_test_rule, "run the examples of your own rules under `ddpcheck run`")
    test_rule.add_argument("file", metavar="FILE", help="the module of the rules, such as lab_rules.py")
    render = add("render", run_render, "show a saved report (JSON or HTML), or convert it")
    render.add_argument("path", metavar="REPORT", help="the file, or - for standard input")
    _add_settings(render, "--output", "--format")
    diff = add("diff", run_diff, "compare two saved reports: new, fixed and remaining findings")
    diff.add_argument("old", metavar="OLD.json", help="a saved report (JSON), or - for standard input")
    diff.add_argument("new", metavar="NEW.json", help="a later report of the same target")
    _add_settings(diff, "--fail-on", "--output", "--format", formats=DIFFERENCE_FORMATS)
    schema = add("schema", run_schema, "print the JSON Schema of saved reports")
    which = "report (default), matrix or difference"
    schema.add_argument("document", metavar="DOCUMENT", nargs="?", choices=[*DOCUMENTS], default="report", help=which)


def _add_tools(add: _AddCommand) -> None:
    init = add("init", run_init, "write a first recipe for a model, and check it")
    init.add_argument("model", metavar="MODEL", help="its class, as path/to/file.py:Class or pkg.module:Class")
    init.add_argument("--args", metavar="ARGS", default="", help="arguments of its constructor, as in Python")
    where = "the recipe to write (default: check_FILE.py beside the model's file, or check_MODULE.py here)"
    init.add_argument("-o", "--output", metavar="FILE", help=where)
    init.add_argument("--force", action="store_true", help="overwrite an existing file")
    environment = add("env", run_env, "print environment information for a bug report")
    environment.add_argument("--format", **_TEXT_OR_JSON)
    skill = "print the path of SKILL.md, instructions on ddpcheck for a coding agent"
    environment.add_argument("--skill", action="store_true", help=skill)
    shell = add("completion", run_completion, "print a completion script")
    shell.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def _add_target(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    group = parser.add_argument_group("what is checked")
    _add_settings(group, *_OF_A_CHECK)
    return group


def _add_settings(parser: argparse._ActionsContainer, *names: str, formats: Iterable[str] = FORMATS) -> None:
    for name in names:
        metavar, text = OPTIONS[name]
        flags = ("-o", name) if name == "--output" else (name,)
        action: Any = StoreOnce if name == "--output" else "append" if name in _REPEATED else "store"
        parser.add_argument(*flags, metavar=metavar, action=action, help=text.format(formats=", ".join(formats)))
        if name == "--format":
            add_display_options(parser)


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion needs the package shtab, which is not installed: pip install shtab") from error
    load_third_party_rules()
    parser = make_parser()
    _add_completions(parser, {"file": shtab.FILE, "folder": shtab.DIRECTORY})
    print_out(shtab.complete(parser, arguments.shell).rstrip("\n"))
    return EXIT_CLEAN


def _add_completions(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if "run" in action.choices:
                _add_options_of_torchrun(action.choices["run"])
            for subparser in action.choices.values():
                _add_completions(subparser, kinds)
            continue
        name = action.dest.removeprefix("check_")
        if action.choices is None and name in _OF_RULES:
            action.choices = (*FAMILIES, *RULES, *(rule.name for rule in RULES.values()))
        elif action.choices is None and name in _COMPLETIONS:
            action.choices = _COMPLETIONS[name]
        if name in _FILES or name in _FOLDERS:
            action.complete = kinds["file" if name in _FILES else "folder"]  # type: ignore[attr-defined]


def _add_options_of_torchrun(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `run` all options of torchrun and ddpcheck, for completion."""
    from torch.distributed.run import get_args_parser

    torchrun_parser = get_args_parser()
    add_check_options(torchrun_parser)
    parser.__dict__.update({**torchrun_parser.__dict__, "prog": parser.prog})
