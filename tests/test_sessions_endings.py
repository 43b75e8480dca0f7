"""Whole sessions that end early, or are long: nothing is left of them, and nothing grows."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests import innerpytest

HANGS = """
import os, time
import pytest

def hang():
    import subprocess, torch.distributed as dist
    subprocess.Popen(["sleep", "100"])
    open(f"hanging {os.environ['PYTEST_CURRENT_TEST'].split()[0][-1]} {dist.get_rank()}", "w").close()
    time.sleep(100)

@pytest.mark.ddp(timeout=90)
def test_1():
    hang()

def test_2(ddp_world):
    ddp_world.run(hang, timeout=90)
"""


class Trial:
    """A session whose processes and files can be told from all others."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._folder = folder
        self._scratch = folder / "scratch"
        self._scratch.mkdir()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return innerpytest.start(self._folder, *arguments, TMPDIR=str(self._scratch), TRIAL=self._mark)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TRIAL") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                pass
        return found

    def _files(self) -> list[str]:
        return [name for name in os.listdir(self._scratch) if not name.startswith("pytest-of-")]

    def left(self, seconds: float) -> list[object]:
        """Processes that live, and files that are there, after at most so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := [*self.processes(), *self._files()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return list(left)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    for process in trial.processes():
        process.kill()


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGKILL, ()),
        (signal.SIGKILL, ("-n", "2")),
        (signal.SIGINT, ()),
        (signal.SIGTERM, ()),
    ],
    ids=["kill", "kill-xdist", "interrupt", "terminate"],
)
def test_nothing_is_left_of_a_session_that_ends_in_a_hang(trial: Trial, tmp_path: Path, number, workers) -> None:
    innerpytest.write(tmp_path, test_hangs=HANGS)
    awaited = [f"hanging {test} {rank}" for test in (1, 2)[: len(workers) or 1] for rank in (0, 1)]
    with trial.start(*workers) as process:
        deadline = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in awaited) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(trial.processes()) >= 6, "pytest, the fork server, the ranks and what they have started"
        process.send_signal(number)
        began = time.monotonic()
        left = trial.left(20)
        seconds = time.monotonic() - began
        assert not left, left
        printed = process.communicate(timeout=20)[0]
    print(f"everything was gone after {seconds:.2f} s")
    if number == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in printed, printed
    else:
        assert process.returncode == -number
