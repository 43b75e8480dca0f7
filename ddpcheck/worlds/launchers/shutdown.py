"""The end of a launched process: on SIGTERM, after the death of its launcher, or with an exit code.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv

_LOOK = 0.25  # seconds between looks at the launcher
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Ending:
    """Ends this process some time after SIGTERM, and at once when its launcher is gone; both raise `SystemExit`.

    A launcher that finds one rank dead ends the others in the same moment: that time is for saying what happened.
    """

    def __init__(self, launch: LauncherEnv, seconds: float) -> None:
        """Be ready for it.

        Args:
            launch: Whose launcher is watched; one by hand is a shell, which may well end before what it has started.
            seconds: From SIGTERM to the end.
        """
        self._watches = launch.launcher != BY_HAND
        self._seconds = seconds
        self._parent = os.getppid()
        self._at_once = threading.Event()
        self._over = threading.Event()
        self._before: object = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._asked)
        if self._watches:
            threading.Thread(target=self._watch, name="ddpcheck-launcher", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]  # what signal() has returned

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._at_once.is_set():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing shall keep us from cleaning up
            raise SystemExit(128 + number)
        self._at_once.set()
        threading.Thread(target=self._later, name="ddpcheck-ending", daemon=True).start()

    def _later(self) -> None:
        if not self._over.wait(self._seconds):
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            if os.getppid() != self._parent:
                self._at_once.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return


def explain_exit(code: int, sentence: str) -> None:
    """Tell torchrun what an exit code means, for the page that it prints about a process that has "failed"."""
    path = os.environ.get(_ERROR_FILE, "")
    if not path or code == 0 or os.path.exists(path):
        return
    told = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": sentence, "extraInfo": told}}, file)
