"""An inner pytest in a process of its own, and what it says of each test."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def _import_path() -> str:
    """Of an inner session: this checkout, and what this process was given, be it another pytest."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run(folder: Path, *arguments: str, input: str | None = None, timeout: float = 250, **environment: str) -> Session:
    """Run the tests of a folder and read the JUnit report."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "ddpcheck.pytest_plugin", "--color=no", "-o", "junit_logging=all"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": _import_path(), **environment},
        input=input,
        stdin=subprocess.DEVNULL if input is None else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Session(read(report) if report.exists() else {}, done.stdout, done.returncode)


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
