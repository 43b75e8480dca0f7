"""The command line, the only part of ddpcheck that prints and exits."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from ddpcheck.cli.launched import EXIT_INTERRUPTED
from ddpcheck.cli.output import complain, complain_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: `sys.argv[1:]`) and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments = argparse.Namespace(debug=False)
    previous = _exit_on_sigterm()
    try:
        arguments = _parsed(words)
        arguments.command_line = shlex.join(("ddpcheck", *words))
        code: int = arguments.command(arguments)
        return code
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if arguments.debug:
            raise
        return complain_of(error)
    finally:
        if previous is not None and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # `_follow` ignores it
            signal.signal(signal.SIGTERM, previous)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, except for the options of `run`, which `run_script` parses."""
    if words[:1] == ["run"]:
        from ddpcheck.cli.run import run_script

        return argparse.Namespace(debug=False, command=run_script, rest=[*words[1:]])
    from ddpcheck.cli.arguments import make_parser

    arguments: argparse.Namespace = make_parser().parse_args(words)
    return arguments


def _exit_on_sigterm() -> Callable[[int, FrameType | None], object] | int | None:
    """Make SIGTERM raise SystemExit, so that cleanup runs; return the previous handler."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        return signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: leave the handler to the embedding program
        return None
