"""Options of `ddpcheck run` (`--check-...`), and splitting of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ddpcheck.findings.errors import UsageError
from ddpcheck.report.settings import Settings, load_settings


class StoreOnce(argparse.Action):
    """Action that stores a value and rejects the option if it is repeated."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            parser.error(f"{option} names two files: {first} and {values}; leave one out")
        setattr(namespace, self.dest, values)


def add_display_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for verbosity and color of a printed report."""
    parser.add_argument("-q", "--quiet", action="store_true", help="print the verdict only")
    whole = "print all names, all evidence and all frames of tracebacks"
    parser.add_argument("-v", "--verbose", action="store_true", help=whole)
    when = "always, never or auto (default): on a terminal, or if FORCE_COLOR is set and NO_COLOR is not"
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", metavar="WHEN", help=when)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the `--check-` options to a parser, and forbid abbreviations."""
    rules = "by code, prefix or name; may be repeated"
    group = parser.add_argument_group("ddpcheck")
    add = group.add_argument
    add("--check-every", type=int, default=10, metavar="N", help="compare the ranks every N steps (default 10)")
    timeout = "stop the script after SECONDS without progress on any rank (default 60)"
    add("--check-timeout", type=float, default=60.0, metavar="SECONDS", help=timeout)
    add("--check-select", action="append", default=[], metavar="RULES", help=f"report only these rules, {rules}")
    add("--check-ignore", action="append", default=[], metavar="RULES", help=f"do not report these rules, {rules}")
    levels = ["error", "warning", "note", "never"]
    add("--check-fail-on", choices=levels, help="exit with 1 from this severity on (default error)")
    baseline = "an earlier report, saved as JSON: its findings are shown as known, and only new ones count"
    add("--check-baseline", metavar="REPORT.json", help=baseline)
    add("--check-output", action=StoreOnce, metavar="FILE", help="write the report to FILE instead of standard error")
    dumps = "write the last collectives of each rank to DIR, as Flight Recorder dumps (see ddpcheck hang)"
    add("--check-flight-recorder", metavar="DIR", help=dumps)
    record = "write the recorded run to FILE, without names, values and source, for a bug report (see ddpcheck render)"
    add("--check-record", metavar="FILE", help=record)
    parity = "run the script again in a single process on the same samples, and compare"
    add("--check-parity", action="store_true", help=parity)
    steps = "compare N optimizer steps and the evaluation that follows (default: all)"
    add("--check-parity-steps", type=int, default=0, metavar="N", help=steps)
    batch = "give each rank at most B samples in a batch, in all runs, for a global batch that one process cannot hold"
    add("--check-parity-batch", type=int, default=0, metavar="B", help=batch)
    form = "format of the report (default: by the extension of FILE, else text)"
    add("--check-format", metavar="FORMAT", help=form)
    add_display_options(group)
    add("--debug", action="store_true", help="show the traceback of an error of ddpcheck")
    abbreviated: Any = parser._get_option_tuples

    def other_options(word: str) -> list[Any]:
        return [option for option in abbreviated(word) if option[0] not in group._group_actions]

    parser._get_option_tuples = other_options  # type: ignore[assignment]


def split_at_script(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into the options and the script with its arguments.

    argparse alone would parse the arguments of the script too, and reject ambiguous prefixes.
    """
    index = 0
    while index < len(words):
        if words[index] == "--":
            index += 1
            break
        if not words[index].startswith("-"):
            break
        index += 2 if _takes_value(parser, words[index]) else 1
    return list(words[:index]), list(words[index:])


def _takes_value(parser: argparse.ArgumentParser, word: str) -> bool:
    options = parser._option_string_actions
    if "=" in word or (word not in options and word[:2] in options):  # as in -r3
        return False
    actions = [options[word]] if word in options else [option[0] for option in parser._get_option_tuples(word)]
    return bool(actions) and actions[0].nargs != 0


def settings_from_args(args: argparse.Namespace) -> Settings:
    """Validate the options and return the settings, completed from pyproject.toml and the environment.

    Raises:
        ConfigError: A setting in pyproject.toml or the environment is invalid.
        UsageError: An option is out of range.
    """
    if args.check_every < 0:
        raise UsageError(f"--check-every is a number of steps, or 0 for never, not {args.check_every}")
    if not 0 < args.check_timeout < float("inf"):
        raise UsageError(f"--check-timeout is a number of seconds above 0, not {args.check_timeout:g}")
    for name in ("steps", "batch"):
        if (number := getattr(args, f"check_parity_{name}")) < 0:
            raise UsageError(f"--check-parity-{name} is a number from 1 on, or 0 for no limit, not {number}")
    names = ("select", "ignore", "fail_on")
    return load_settings({name: getattr(args, f"check_{name}") for name in names}, prefix="--check-")
