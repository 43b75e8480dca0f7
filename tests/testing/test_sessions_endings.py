"""Whole sessions that end early, or are long: nothing is left of them."""

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
        running = [each for each in psutil.process_iter(["environ", "status"]) if each.info["status"] != "zombie"]
        return [each for each in running if (each.info["environ"] or {}).get("TRIAL") == self._mark]

    def left(self, seconds: float) -> list[object]:
        """Processes that live, and files that are there, after at most so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            files = [name for name in os.listdir(self._scratch) if not name.startswith("pytest-of-")]
            left = [*self.processes(), *files]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path)
    yield trial
    for process in trial.processes():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGKILL, ()), (signal.SIGKILL, ("-n", "2")), (signal.SIGINT, ()), (signal.SIGTERM, ())],
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
        # Two seconds on an idle machine; a worker of xdist that waited for its test would take more than six.
        left = trial.left(20 if number != signal.SIGKILL else 5)
        assert not left, left
        printed = process.communicate(timeout=60)[0]
    if number == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in printed, printed
    else:
        assert process.returncode == -number


# --- Many ----------------------------------------------------------------------------------------------------------

MANY = """
import pytest

def work():
    import torch, torch.distributed as dist  # here: pytest itself can do without, and starts the sooner
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)

@pytest.mark.ddp
@pytest.mark.parametrize("world_size, number", [(number % 3 + 1, number) for number in range(20)])
def test_marker(world_size, number):
    assert work() == world_size

@pytest.mark.parametrize("number", range(20))
def test_fixture(number, ddp_world):
    size = number % 3 + 1
    assert ddp_world(world_size=size).run(work) == [size] * size
"""
TROUBLE = """
import time
import pytest

@pytest.mark.ddp
def test_fails(rank):
    assert rank == 0, "on purpose"

@pytest.mark.ddp(timeout=4)
def test_hangs(rank):
    if rank == 0:
        time.sleep(60)

@pytest.mark.ddp
def test_stops(rank):
    breakpoint()
"""


@pytest.mark.slow
def test_many_worlds_in_more_workers_than_cores(trial: Trial, tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_many=MANY, test_trouble=TROUBLE)
    report = tmp_path / "report.xml"
    with trial.start("-n", "4", "--dist=worksteal", f"--junitxml={report}") as process:
        printed = process.communicate(timeout=280)[0]
    assert not trial.left(20)
    done = innerpytest.Session(innerpytest.read(report), printed, process.returncode)
    assert innerpytest.names(done, "failed") == ["test_fails", "test_hangs", "test_stops"], printed
    assert len(innerpytest.names(done, "passed")) == 40, printed
    assert "rank 1: AssertionError: on purpose" in done["test_fails"].text
    assert "rank 0 did not finish within 4 s: rank 0 is in test_hangs at test_trouble.py" in done["test_hangs"].text
    sentence = "breakpoint() on a rank needs pytest in a terminal; run it without pytest-xdist (-n 0)"
    assert sentence in done["test_stops"].text
