"""The benchmark of harnesses: what it counts, what follows from it, and that it leaves nothing behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
if not sys.platform.startswith("linux"):
    pytest.skip("the benchmark needs Linux", allow_module_level=True)

from benchmarks.harnesses.catalogue import CATALOGUE, ROWS  # noqa: E402
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


def record(*found: Measured) -> Record:
    about = {"cores": "2", "system": "Linux", "python": "3.11", "torch": "2.13", "pytest": "9.2"}
    return Record(about, 1, {(each.row, each.world_size): each for each in found})


FULL = record(
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

# --- From sessions to figures


def test_a_further_test_is_what_the_longer_session_takes_longer() -> None:
    one = Measured("fixture", 2, 11, [Cost(3.0, 4.0), Cost(5.0, 4.0), Cost(4.0, 4.0)])
    one.longer = [Cost(3.5, 5.0), Cost(5.2, 6.0), Cost(14.0, 4.5)]  # someone else was busy in the last
    assert one.cold == Cost(4.0, 4.0)
    assert one.further == Cost(pytest.approx(0.05), pytest.approx(0.1))


def test_a_session_that_failed_gives_no_figure() -> None:
    assert Measured("fixture", 2, 11).cold is None
    assert Measured("fixture", 2, 11, [Cost(1.0, 1.0)]).further is None


def test_aims_are_met_missed_or_not_measured() -> None:
    wall, cpu, first, session, memory = aims(FULL.measurements)
    assert (wall.verdict, round(wall.value, 6)) == ("met", 29.0)
    assert (cpu.verdict, round(cpu.value)) == ("not met", 97)
    assert (first.verdict, round(first.value, 3)) == ("met", round(2.3 / 2.05, 3))
    assert (session.verdict, round(session.value, 3)) == ("not met", round(4.0 / 2.55, 3))
    assert (memory.verdict, memory.value) == ("met", 1.45)
    assert {aim.verdict for aim in aims({})} == {"not measured"}


def test_a_difference_that_noise_made_negative_meets_no_aim() -> None:
    lost = record(measured("fixture", 2, 4.0, -0.01), measured("spawned", 2, 5.0, 2.8))
    assert [aim.verdict for aim in aims(lost.measurements)[:2]] == ["not measured"] * 2


def test_an_aim_says_how_far_the_repetitions_are_apart() -> None:
    one = Measured("fixture", 2, 11, [Cost(3.0, 1.0)] * 3, [Cost(3.2, 2.0), Cost(3.25, 2.0), Cost(3.4, 2.0)])
    wall = aims(record(one).measurements)[0]
    assert (wall.value, wall.range) == (pytest.approx(25), (pytest.approx(20), pytest.approx(40)))
    assert "25.0 ms (20.0 to 40.0), aim: at most 30 ms: met" in for_terminal(record(one))


# --- Showing them


def test_the_table_fits_a_terminal_and_says_what_is_missing() -> None:
    wide = measured("multi_process", 4, 1234.5, 123.4, memory=Memory(99 << 30, 0), problem="exit code 1")
    text = for_terminal(record(*FULL.measurements.values(), measured("fixture", 4, 3.0, 0.0011), wide))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert any("@pytest.mark.ddp" in line and "not available" in line for line in text.splitlines())
    assert "112,182" in text  # times ddp_world
    assert "until it stopped: exit code 1" in text


def test_a_saved_run_is_shown_as_it_was(tmp_path: Path) -> None:
    FULL.save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    assert for_terminal(again) == for_terminal(FULL)
    assert for_page(again) == for_page(FULL)


def test_rows_are_files_and_files_are_rows() -> None:
    helpers = {"work", "launched_program"}
    assert {row.file or row.key for row in CATALOGUE.values()} == {path.stem for path in ROWS.glob("*.py")} - helpers


# --- What is counted, in a process of its own, which may have no children but those of a session


def in_a_session(program: str, *, timeout: float = 120, **options) -> dict:
    source = f"""
import dataclasses, json, os, sys
from benchmarks.harnesses.sessions import adopt_orphans, run_session
adopt_orphans()
found = run_session([sys.executable, "-c", {program!r}], dict(os.environ), **{options!r})
print(json.dumps(dataclasses.asdict(found)))
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_cpu_of_a_process_that_outlives_its_parent_is_counted() -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"
    found = in_a_session(program, deadline=60)
    assert found["code"] == 0
    assert found["left"] == 0
    assert 0.5 <= found["cpu"] < 2


SLEEPER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_what_stays_behind_is_told_and_ended() -> None:
    found = in_a_session(SLEEPER, deadline=60, orphans=0.1)
    assert found["left"] == 1
    assert not psutil.pid_exists(int(found["output"]))


@pytest.mark.slow
def test_a_session_past_its_deadline_is_ended_with_all_its_processes() -> None:
    began = time.monotonic()
    found = in_a_session(SLEEPER + "child.wait()", deadline=3)
    assert found["code"] is None
    assert not psutil.pid_exists(int(found["output"]))
    assert time.monotonic() - began < 100


def test_memory_that_processes_share_counts_once() -> None:
    program = """
import os, time
block = b"x" * (64 << 20)
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        time.sleep(1)
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""
    found = in_a_session(program, deadline=60, memory=True)
    assert 64 << 20 <= found["memory"]["total"] < 128 << 20
    assert 40 << 20 < found["memory"]["below"] < 80 << 20  # three of the four that share it


@pytest.mark.exhaustive
def test_the_command_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    options = "--repetitions 1 --ranks 2 --json run.json --only imported worlds fixture".split()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.harnesses", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Record.load(tmp_path / "run.json").measurements
    for each in found.values():
        assert each.problem == "not available" or (each.cold.wall > 0 and each.memory.total > 0), each
    assert not found["fixture", 2].problem
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(ROWS) in " ".join(one.info["cmdline"] or [])]
