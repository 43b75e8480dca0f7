"""`ddpcheck completion SHELL`: shell completion of commands, options and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpcheck.cli.output import print_out
from ddpcheck.findings.errors import EXIT_CLEAN, UsageError
from ddpcheck.findings.rules import FAMILIES, RULES
from ddpcheck.render import FORMATS
from ddpcheck.run.check_options import add_check_options

SHELLS = ("bash", "zsh", "fish")
_RULES = (*FAMILIES, *RULES, *(rule.name for rule in RULES.values()))
_VALUES: Mapping[str, Sequence[str]] = {
    "select": _RULES,
    "ignore": _RULES,
    "rules": _RULES,
    "backend": ("gloo", "nccl"),
    "device": ("cpu", "cuda"),
    "launcher": ("auto", "on", "off"),
    "fail_on": ("error", "warning", "note", "never"),
    "format": tuple(FORMATS),
}
_FILES = frozenset({"target", "model", "output", "baseline", "path", "old", "new", "training_script"})
_FOLDERS = frozenset({"folder", "repro", "flight_recorder", "log_dir"})


def run_completion(arguments: argparse.Namespace, make_parser: Callable[[], argparse.ArgumentParser]) -> int:
    """Print the completion script of a shell."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion needs the package shtab, which is not installed: pip install shtab") from error
    parser = make_parser()
    _describe(parser, {"file": shtab.FILE, "folder": shtab.DIRECTORY})
    print_out(shtab.complete(parser, arguments.shell).rstrip("\n"))
    return EXIT_CLEAN


def _describe(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Set the completion choices of each argument of a parser, recursively."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if "run" in action.choices:
                _add_options_of_torchrun(action.choices["run"])
            for subparser in action.choices.values():
                _describe(subparser, kinds)
            continue
        name = action.dest.removeprefix("check_")
        if action.choices is None and name in _VALUES:
            action.choices = _VALUES[name]
        if name in _FILES or name in _FOLDERS:
            action.complete = kinds["file" if name in _FILES else "folder"]  # type: ignore[attr-defined]


def _add_options_of_torchrun(parser: argparse.ArgumentParser) -> None:
    """Replace the remainder argument of `run` by the options of torchrun and ddpcheck."""
    from torch.distributed.run import get_args_parser

    torchrun_parser = get_args_parser()
    add_check_options(torchrun_parser)
    parser.__dict__.update({**torchrun_parser.__dict__, "prog": parser.prog})
