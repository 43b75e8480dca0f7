"""A command on ranks that a launcher has started: rank 0 runs it, and the others follow."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddpcheck.cli.output import complain
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_TARGET, EXIT_USAGE, DDPCheckError
from ddpcheck.report.settings import load_settings

if TYPE_CHECKING:
    from ddpcheck.worlds.launchers.detection import LauncherEnv
    from ddpcheck.worlds.launchers.leader import Leader

EXIT_INTERRUPTED = 128 + signal.SIGINT

_LAST_WORDS = 2.0  # seconds that rank 0 has for a report after SIGTERM; the others wait a little longer for it
_WITHOUT_LEADER = 3.0
_LOOK = 0.25  # seconds between looks at the launcher


def on_launched_ranks(
    run: Callable[[argparse.Namespace, Leader | None], int],
) -> Callable[[argparse.Namespace], int]:
    """The command on the ranks that a launcher has started, if one has: rank 0 runs it, and the others follow."""

    def command(arguments: argparse.Namespace) -> int:
        launch = _launch(arguments)
        if launch is None:
            return run(arguments, None)
        if launch.rank:
            return _follow(launch)
        from ddpcheck.worlds.launchers.leader import Leader

        code, sentence = EXIT_USAGE, ""
        with ending(launch, _LAST_WORDS), contextlib.closing(Leader(launch)) as hosts:
            try:
                code = run(arguments, hosts)
                sentence = "ddpcheck did not crash: the report on the target says why"
            except DDPCheckError as error:
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
    except DDPCheckError:
        launcher = "auto"  # rank 0 will say what is wrong
    if launcher == "off":
        return None
    from ddpcheck.worlds.launchers.detection import detect, require

    return require() if launcher == "on" else detect()


def _follow(launch: LauncherEnv) -> int:
    """Be another rank than 0: silent, and content with whatever rank 0 comes to, which alone has the exit code."""
    from ddpcheck.worlds.launchers.follower import Follower

    try:
        with ending(launch, _WITHOUT_LEADER):
            if Follower(launch).serve():
                return EXIT_CLEAN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # rank 0 is told the same
    if launch.rank == 1:  # one is enough
        complain("rank 0 was lost before it could write the report; the output of its launcher may say how")
    return EXIT_TARGET


@contextlib.contextmanager
def ending(launch: LauncherEnv, seconds: float) -> Iterator[None]:
    """End this process some seconds after SIGTERM, and at once when its launcher is gone; both raise `SystemExit`.

    A launcher that finds one rank dead ends the others in the same moment: that time is for saying what happened. A
    launch by hand has no launcher to watch: a shell may well end before what it has started.
    """
    from ddpcheck.worlds.launchers.detection import BY_HAND

    parent, over, due = os.getppid(), threading.Event(), math.inf

    def asked(number: int, _: object) -> None:
        nonlocal due
        if due < math.inf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing shall keep us from cleaning up
            raise SystemExit(128 + number)
        due = time.monotonic() + seconds

    def watch() -> None:
        nonlocal due
        while not over.wait(_LOOK):
            if time.monotonic() > due or (launch.launcher != BY_HAND and os.getppid() != parent):
                due = 0.0
                os.kill(os.getpid(), signal.SIGTERM)
                return

    before = signal.signal(signal.SIGTERM, asked)
    threading.Thread(target=watch, name="ddpcheck-ending", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)


def explain_exit(code: int, sentence: str) -> None:
    """Tell torchrun what an exit code means, for the page that it prints about a process that has "failed"."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or code == 0 or os.path.exists(path):
        return
    told = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": sentence, "extraInfo": told}}, file)
