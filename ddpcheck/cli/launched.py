"""Run commands on the ranks of a launcher: rank 0 leads, others follow."""

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

_REPORT_SECONDS = 2.0  # seconds for rank 0 to report after SIGTERM
_EXIT_SECONDS = 3.0  # seconds for the other ranks to exit after SIGTERM: longer than for rank 0
_POLL = 0.25  # seconds between polls of the launcher


def on_launched_ranks(run: Callable[[argparse.Namespace, Leader | None], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command so that under a launcher only rank 0 runs it."""

    def command(arguments: argparse.Namespace) -> int:
        launch = _launcher_of(arguments)
        if launch is None:
            return run(arguments, None)
        if launch.rank:
            return _serve_rank_0(launch)
        from ddpcheck.worlds.launchers.leader import Leader

        code, sentence = EXIT_USAGE, ""
        with ending(launch, _REPORT_SECONDS), contextlib.closing(Leader(launch)) as hosts:
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


def _launcher_of(arguments: argparse.Namespace) -> LauncherEnv | None:
    try:
        launcher = load_settings({"launcher": arguments.launcher}).launcher
    except DDPCheckError:
        launcher = "auto"  # rank 0 reports the error
    if launcher == "off":
        return None
    from ddpcheck.worlds.launchers.detection import detect, require

    return require() if launcher == "on" else detect()


def _serve_rank_0(launch: LauncherEnv) -> int:
    """Serve requests of rank 0 until rank 0 ends; return this process's exit code."""
    from ddpcheck.worlds.launchers.leader import Follower

    # To the end of this process: torchrun terminates the other ranks once rank 0 has exited with an error, and would
    # list a rank that dies of SIGTERM while its interpreter exits as a second failure. `ending` has a deadline.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ending(launch, _EXIT_SECONDS):
            if Follower(launch).serve():
                return EXIT_CLEAN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # rank 0 gets the same signal
    if launch.rank == 1:  # one message is enough
        complain("rank 0 was lost before it could write the report; the output of its launcher may say how")
    return EXIT_TARGET


@contextlib.contextmanager
def ending(launch: LauncherEnv, seconds: float) -> Iterator[None]:
    """Context that ends this process `seconds` after SIGTERM, or when the launcher has exited.

    A launcher ends all ranks as soon as one rank dies; the delay leaves time to report. If the user started the ranks
    in a shell, the exit of the shell is ignored, since a shell may exit before its children.
    """
    from ddpcheck.worlds.launchers.detection import BY_HAND

    parent, is_over, deadline = os.getppid(), threading.Event(), math.inf

    def on_sigterm(number: int, _: object) -> None:
        nonlocal deadline
        if deadline < math.inf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # do not interrupt the cleanup
            raise SystemExit(128 + number)
        deadline = time.monotonic() + seconds

    def watch() -> None:
        nonlocal deadline
        while not is_over.wait(_POLL):
            if time.monotonic() > deadline or (launch.launcher != BY_HAND and os.getppid() != parent):
                deadline = 0.0
                os.kill(os.getpid(), signal.SIGTERM)
                return

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    threading.Thread(target=watch, name="ddpcheck-ending", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        signal.signal(signal.SIGTERM, previous)


def explain_exit(code: int, sentence: str) -> None:
    """Write the reason of a failure into torchrun's error file, for torchrun's summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or code == 0 or os.path.exists(path):
        return
    extra_info = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": sentence, "extraInfo": extra_info}}, file)
