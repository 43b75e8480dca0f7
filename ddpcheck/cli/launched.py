"""A command on ranks that a launcher has started: rank 0 runs it, and the others follow.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpcheck.cli.output import complain
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_TARGET, EXIT_USAGE, DdpcheckError
from ddpcheck.report.settings import load_settings

if TYPE_CHECKING:
    from ddpcheck.harness import RankHosts
    from ddpcheck.worlds.launchers import LauncherEnv

EXIT_INTERRUPTED = 128 + signal.SIGINT

_LAST_WORDS = 2.0  # seconds that rank 0 has for a report after SIGTERM; the others wait a little longer for it
_WITHOUT_LEADER = 3.0


def on_launched_ranks(
    run: Callable[[argparse.Namespace, RankHosts | None], int],
) -> Callable[[argparse.Namespace], int]:
    """The command on the ranks that a launcher has started, if one has: rank 0 runs it, and the others follow."""

    def command(arguments: argparse.Namespace) -> int:
        launch = _launch(arguments)
        if launch is None:
            return run(arguments, None)
        if launch.rank:
            return _follow(launch)
        from ddpcheck.worlds.launchers import Ending, Leader, explain_exit

        code, sentence = EXIT_USAGE, ""
        with Ending(launch, _LAST_WORDS), Leader(launch) as hosts:
            try:
                code = run(arguments, hosts)
                sentence = "ddpcheck has not crashed: this is what it says of the target, in the report"
            except DdpcheckError as error:
                code, sentence = error.exit_code, f"ddpcheck: error: {error}"
                raise
            finally:
                explain_exit(code, sentence)
        return code

    return command


def _launch(arguments: argparse.Namespace) -> LauncherEnv | None:
    """The launcher's environment; `None` where the ranks are to be new processes."""
    try:
        launcher = load_settings({"launcher": arguments.launcher}).launcher
    except DdpcheckError:
        launcher = "auto"  # rank 0 will say what is wrong
    if launcher == "off":
        return None
    from ddpcheck.worlds.launchers import detect, require

    return require() if launcher == "on" else detect()


def _follow(launch: LauncherEnv) -> int:
    """Be another rank than 0: silent, and content with whatever rank 0 comes to, which alone has the exit code."""
    from ddpcheck.worlds.launchers import Ending, follow

    try:
        with Ending(launch, _WITHOUT_LEADER):
            if follow(launch):
                return EXIT_CLEAN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # rank 0 is told the same
    if launch.rank == 1:  # one is enough
        complain("rank 0 was lost before it could write the report; its launcher knows how")
    return EXIT_TARGET
