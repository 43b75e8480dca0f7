"""The benchmark of harnesses: what it counts, what follows from it, and that it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
if not sys.platform.startswith("linux"):
    pytest.skip("the benchmark needs Linux", allow_module_level=True)

from benchmarks.harnesses.figures import Cost, Measured, aims  # noqa: E402
from benchmarks.harnesses.record import Record  # noqa: E402
from benchmarks.harnesses.sessions import Memory  # noqa: E402
from benchmarks.harnesses.table import WIDTH, for_page, for_terminal  # noqa: E402

ROOT = Path(__file__).parents[1]


def measured(row: str, world_size: int, cold: float, further: float, tests: int = 11, **more) -> Measured:
    """As if each session had been timed once, with half a second of CPU time for a second."""
    total = cold + (tests - 1) * further
    longer = [Cost(total, total / 2)] if tests > 1 else []
    return Measured(row, world_size, tests, [Cost(cold, cold / 2)], longer, **more)


FULL = Record(
    {"cores": "2", "system": "Linux", "python": "3.11", "torch": "2.13", "pytest": "9.2"},
    1,
    {
        (row.row, row.world_size): row
        for row in (
            measured("imported", 0, 2.0, 0.0, tests=1),
            measured("empty", 0, 2.5, 0.001),
            measured("alone", 1, 2.0, 0.01, memory=Memory(200 << 20, 0)),
            measured("forked", 2, 2.0, 0.05),
            measured("worlds", 2, 2.3, 0.06),
            measured("fixture", 2, 4.0, 0.029),
            Measured("marker", 2, 11, problem="not available"),
            measured("spawned", 2, 5.0, 2.8),
            measured("worlds", 4, 2.3, 0.06, memory=Memory(330 << 20, 290 << 20)),
        )
    },
)


def test_aims_are_met_missed_or_not_measured() -> None:
    wall, cpu, first, session, memory = aims(FULL.measurements)
    assert (wall.verdict, round(wall.value, 6)) == ("met", 29.0)
    assert (cpu.verdict, round(cpu.value)) == ("not met", 97)
    assert (first.verdict, round(first.value, 3)) == ("met", round(2.3 / 2.05, 3))
    assert (session.verdict, round(session.value, 3)) == ("not met", round(4.0 / 2.55, 3))
    assert (memory.verdict, memory.value) == ("met", 1.45)
    assert {aim.verdict for aim in aims({})} == {"not measured"}


def test_a_saved_run_is_shown_as_it_was_and_fits_a_terminal(tmp_path: Path) -> None:
    FULL.save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    text = for_terminal(again)
    assert text == for_terminal(FULL) and for_page(again) == for_page(FULL)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert any("@pytest.mark.ddp" in line and "not available" in line for line in text.splitlines())


def in_a_session(program: str, **options) -> dict:
    """What is counted, in a process of its own, which may have no children but those of a session."""
    source = f"""
import dataclasses, json, os, sys
from benchmarks.harnesses.sessions import adopt_orphans, run_session
adopt_orphans()
session = run_session([sys.executable, "-c", {program!r}], dict(os.environ), **{options!r})
print(json.dumps(dataclasses.asdict(session)))
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BURN = "import time\nwhile time.process_time() < 0.5: pass"
SLEEPER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
"""
FORKS = """
import os, time
block = b"x" * (64 << 20)
for _ in range(3):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
"""


def test_cpu_of_a_process_that_outlives_its_parent_is_counted() -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"
    session = in_a_session(program, deadline=60)
    assert (session["code"], session["left"]) == (0, 0) and 0.5 <= session["cpu"] < 2


def test_what_stays_behind_is_counted_and_ended() -> None:
    session = in_a_session(SLEEPER, deadline=60, orphans=0.1)
    assert session["left"] == 1 and not psutil.pid_exists(int(session["output"]))


def test_memory_that_processes_share_counts_once() -> None:
    memory = in_a_session(FORKS, deadline=60, memory=True)["memory"]
    assert 64 << 20 <= memory["total"] < 128 << 20
    assert 40 << 20 < memory["below"] < 80 << 20  # three of the four that share it
