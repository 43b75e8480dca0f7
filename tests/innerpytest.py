"""An inner pytest in a process of its own, and what it says of each test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.worlds.rank_setup import NO_PRELOAD

# Hypothesis is not used in there, and its plugin imports all of it, a second of work, to say so.
PLUGINS = ("-p", "ddpcheck.pytest_plugin", "-p", "no:hypothesispytest", "--color=no")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Said:
    """What pytest says of a test: `passed`, `failed`, `error` or `skipped`, and why."""

    outcome: str
    text: str = ""
    output: str = ""


@dataclass(frozen=True)
class Session:
    """A session that has ended."""

    tests: dict[str, Said]
    stdout: str
    returncode: int

    def __getitem__(self, name: str) -> Said:
        return self.tests[name]


def start(folder: Path, *arguments: str, program: Sequence[str] = ("pytest",), **options: Any) -> subprocess.Popen[str]:
    """Start pytest, or a program that runs it, in a folder; its output is one stream, to be read as it comes.

    `options` are environment variables, but for `stdin`, which is as of `subprocess.Popen`.
    """
    stdin = options.pop("stdin", subprocess.DEVNULL)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # be it to another pytest
    return subprocess.Popen(
        [sys.executable, "-m", *program, *PLUGINS, "-o", "junit_logging=all", *arguments],
        cwd=folder,
        env={**_environment(), "PYTHONPATH": path, **options},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What is started in the background of a shell ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _environment() -> dict[str, str]:
    """Ours, without what makes a session part of another one; its fork server imports nothing ahead of its use.

    Seconds of processor time, and an inner session that wraps a model in DDP is better run `innerhere`.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**own, NO_PRELOAD: "1"}


def run(folder: Path, *arguments: str, input: str | None = None, timeout: float = 250, **options: Any) -> Session:
    """Run the tests of a folder to their end and read the JUnit report; the options are those of `start`."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(folder, f"--junitxml={report}", *arguments, **options) as process:
        try:
            stdout, _ = process.communicate(input, timeout)
        finally:
            process.kill()
    return Session(read(report) if report.exists() else {}, stdout, process.returncode)


def read(path: Path) -> dict[str, Said]:
    """What a JUnit report says of each test, by its name."""
    said = {}
    for case in ElementTree.parse(path).iter("testcase"):
        child = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if child is None else {"failure": "failed", "error": "error"}.get(child.tag, "skipped")
        text = "" if child is None else f"{child.get('message')}\n{child.text}"
        output = "".join(each.text or "" for each in case if each.tag.startswith("system-"))
        said[str(case.get("name"))] = Said(outcome, text, output)
    return said


def write(folder: Path, **files: str) -> None:
    """Write test files, named without their ending."""
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)


def names(session: Session, outcome: str) -> Sequence[str]:
    """The tests with an outcome."""
    return sorted(name for name, said in session.tests.items() if said.outcome == outcome)
