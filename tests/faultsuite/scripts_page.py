"""Writes docs/scripts.md: each script of examples/scripts under torchrun and under `ddpcheck run`, and its fixed twin.

    python -m tests.faultsuite.scripts_page [NAME ...]

What torchrun says is the first exception on standard error. A script whose finding is not what its `EXPECT` says, or
whose fixed twin is not clean, is named on standard error, and keeps the row that it had.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
PATIENCE = 40  # seconds that a script under torchrun is given; gloo itself would wait for half an hour
TIMEOUT = 10  # of --check-timeout


HEAD = f"""\
<!-- Written by `python -m tests.faultsuite.scripts_page`. -->
# Scripts under torchrun and ddpcheck run

Each script of [examples/scripts](../examples/scripts) has one fault, and none with `--fixed`. The table
shows what torchrun and `ddpcheck run --check-timeout {TIMEOUT}` print of it, on 2 ranks, gloo, CPU, 2
cores; a row names the options that its fault needs besides. Times are from start to end, with the import
of torch. No fixed twin has a finding under `ddpcheck run`, with the same options.

| script | fault | torchrun says | ddpcheck run says |
|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Ran:
    """A script that has run: its exit code (`None`: it was still waiting), seconds, and standard error."""

    code: int | None
    seconds: float
    stderr: str


def run(*command: str, patience: float = PATIENCE) -> Ran:
    """Run a command, once more where gloo has aborted a healthy process at its exit, as it now and then does."""
    ran = _run(*command, patience=patience)
    return _run(*command, patience=patience) if "terminate called without an active exception" in ran.stderr else ran


def _run(*command: str, patience: float) -> Ran:
    """Run a command in a session of its own, which is ended when its time is over."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=patience + 60 if "ddpcheck" in command else patience)
        return Ran(process.returncode, time.monotonic() - began, stderr)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the agent ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return Ran(None, time.monotonic() - began, "")


def said_by_torchrun(ran: Ran) -> str:
    """What a user reads of it, in a few words."""
    if ran.code is None:
        return f"nothing: it waits (ended after {PATIENCE} s)"
    if ran.code == 0:
        return "nothing: exit code 0"
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in ran.stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line) and "ChildFailed" not in line]
    text = errors[0] if errors else "a rank died"
    return f"after {ran.seconds:.0f} s: {text[:110]}{'...' if len(text) > 110 else ''}"


def expected_of(script: Path) -> dict[str, Any]:
    """What a script says of its own fault: its code, and where more is known its ranks, subjects, cause and line."""
    return dict(_assigned(script, "EXPECT"))


def options_of(script: Path) -> list[str]:
    """The options of `ddpcheck run` without which the fault of a script is not found: its `OPTIONS`."""
    return list(_assigned(script, "OPTIONS", ()))


def _assigned(script: Path, name: str, *default: Any) -> Any:
    found = [
        ast.literal_eval(node.value)
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    (value,) = found or default
    return value


def assert_expected(script: Path, exit_code: int | None, report: dict[str, Any]) -> None:
    """Assert that the report of a script has one finding, and that it is the one that the script expects."""
    expected = expected_of(script)
    found = [(one["code"], one["location"]["line"], one["message"]) for one in report["findings"]]
    assert len(found) == 1, found
    (finding,) = report["findings"]
    assert finding["code"] == expected["code"], found
    assert finding["subjects"] == expected.get("subjects", finding["subjects"]), finding["subjects"]
    assert finding["ranks"] == expected.get("ranks", []), finding["ranks"]
    assert expected.get("cause", "") in finding["message"], found
    path, line = finding["location"]["path"], finding["location"]["line"]
    assert path == script.relative_to(ROOT).as_posix(), path
    assert expected.get("line", "") in script.read_text().splitlines()[line - 1], found
    assert bool(exit_code) == (finding["severity"] == "error"), (exit_code, finding["severity"])


def row(script: Path) -> str:
    """One row of the table."""
    name = script.relative_to(ROOT).as_posix()
    launch = ("--standalone", "--nproc-per-node=2")
    plain = run("torch.distributed.run", *launch, name)
    with tempfile.TemporaryDirectory() as folder:
        options = (f"--check-timeout={TIMEOUT}", f"--check-output={folder}/report.json", *options_of(script))
        watched = run("ddpcheck", "run", *launch, *options, name)
        report = json.loads(Path(folder, "report.json").read_text())
        assert_expected(script, watched.code, report)
        (finding,) = report["findings"]
        fixed = run("ddpcheck", "run", *launch, *options, name, "--fixed")
        clean = json.loads(Path(folder, "report.json").read_text())["status"]
    line = finding["location"]["line"]
    shown = script.read_text().splitlines()[line - 1].strip().replace("|", "\\|")
    title = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    assert fixed.code == 0 and clean in ("clean", "incomplete"), (name, fixed)
    also = "".join(f"with `{option}`, " for option in options_of(script))
    found = f"**{finding['code']}** {finding['severity']}, line {line}: `{shown}`, {also}after {watched.seconds:.0f} s"
    return f"| [{script.stem}](../{name}) | {title} | {said_by_torchrun(plain)} | {found} |".replace("``", "`")


def main(arguments: Sequence[str]) -> None:
    known_names = sorted(script.stem for script in SCRIPTS.glob("*.py"))
    parser = argparse.ArgumentParser(
        prog="python -m tests.faultsuite.scripts_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a script, without .py; all of them take half an hour")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - set(known_names):
        parser.error(f"no such script in examples/scripts: {', '.join(sorted(unknown))}")
    page = ROOT / "docs" / "scripts.md"
    wrong = []
    for name in names or known_names:
        try:
            made = row(SCRIPTS / f"{name}.py")
        except (AssertionError, OSError) as error:  # an OSError: there is no report
            wrong.append(name)
            print(f"{name} is not as it says: {error}", file=sys.stderr, flush=True)
            continue
        print(made, flush=True)
        known = {found[1]: line for line in page.read_text().splitlines() if (found := re.match(r"\| \[(\w+)\]", line))}
        known[name] = made
        page.write_text(page_of([known[one] for one in known_names if one in known]))
    if wrong:
        sys.exit(f"not written: {', '.join(wrong)}")


def page_of(rows: Sequence[str]) -> str:
    return "\n".join([HEAD, *rows, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
