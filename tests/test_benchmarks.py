"""The benchmark of harnesses: what it counts, and that it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
if not sys.platform.startswith("linux"):
    pytest.skip("the benchmark needs Linux", allow_module_level=True)

ROOT = Path(__file__).parents[1]


def in_a_session(program: str, **options) -> dict:
    """Return the figures of a session that runs `program`, from a process without other children."""
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


def test_cpu_of_a_process_that_outlives_its_parent_is_counted() -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}], start_new_session=True)"
    session = in_a_session(program, deadline=60)
    assert (session["code"], session["left"]) == (0, 0) and 0.5 <= session["cpu"] < 2


def test_what_stays_behind_is_counted_and_ended() -> None:
    session = in_a_session(SLEEPER, deadline=60, orphans=0.1)
    assert session["left"] == 1 and not psutil.pid_exists(int(session["output"]))
