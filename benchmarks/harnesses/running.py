"""The order of the runs: every row in turn, and all of it again, so that the load of the machine meets all alike."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.harnesses.catalogue import Row, pytest_command
from benchmarks.harnesses.figures import Cost, Measured
from benchmarks.harnesses.record import Record, surroundings
from benchmarks.harnesses.sessions import Session, adopt_orphans, run_session

ROOT = Path(__file__).resolve().parents[2]
_HOLD = 0.5  # seconds that ranks stay while memory is read
_HELD_TESTS = 2  # of such a session: what is prepared during the first test is there in the second

Say = Callable[[str], None]


def measure(
    rows: Iterable[Row], sizes: Sequence[int], *, quick: bool, repetitions: int, deadline: float, say: Say
) -> Record:
    """Measure rows.

    Args:
        rows: Which.
        sizes: World sizes; rows without ranks, or with one, are measured in any case.
        quick: Fewer tests in a session, and none for its memory.
        repetitions: How often each session is timed.
        deadline: Seconds for each session.
        say: Told how far it has come, and what went wrong.

    Ctrl-C ends it; what has been measured until then is returned.
    """
    adopt_orphans()
    found: dict[tuple[str, int], Measured] = {}
    complete = False
    with tempfile.TemporaryDirectory(prefix="harnesses-") as directory, contextlib.suppress(KeyboardInterrupt):
        runs = _Runs(Path(directory), deadline, say)
        plan = [(row, size) for row in rows for size in row.sizes if size in (0, 1, *sizes)]
        for row, size in plan:
            tests = row.tests[quick] if row.tests else 1
            found[row.key, size] = Measured(row.key, size, tests, problem=runs.missing(row))
        ready = [(row, found[row.key, size]) for row, size in plan if not found[row.key, size].problem]
        held = [] if quick else ready
        runs.planned = len(held) + sum(repetitions * (2 if row.tests else 1) for row, _ in ready)
        for row, one in held:  # these come first, and so write the bytecode and warm the caches
            session = runs.session(row, one, min(one.tests, _HELD_TESTS), memory=True)
            one.memory = session and session.memory
        for _ in range(repetitions):
            for row, one in ready:
                for tests, costs in ((1, one.first), (one.tests, one.longer)):
                    if not one.problem and (row.tests or costs is one.first):
                        session = runs.session(row, one, tests)
                        if session is not None:
                            costs.append(Cost(session.wall, session.cpu))
        complete = True
    return Record(surroundings(), repetitions, found, complete)


class _Runs:
    """Sessions in the same surroundings."""

    def __init__(self, directory: Path, deadline: float, say: Say) -> None:
        self._ini = directory / "pytest.ini"
        self._ini.write_text("[pytest]\n", encoding="utf-8")
        self._deadline = deadline
        self._say = say
        self._printed: dict[str, str] = {}
        self._done = 0
        self.planned = 0

    def session(self, row: Row, one: Measured, tests: int, memory: bool = False) -> Session | None:
        """Run one session; None where it failed, with the reason in `one`."""
        session = run_session(
            row.command(one.world_size, self._ini),
            _environment(one.world_size, tests, _HOLD if memory else 0.0),
            deadline=self._deadline,
            memory=memory,
        )
        self._done += 1
        who = f"{row.title}, {one.world_size} ranks, {tests} tests"
        if session.code is None:
            problem = f"not done within {self._deadline:g} s"
        elif session.code:
            missing = "No module named 'expecttest'"  # which torch's own harnesses import
            problem = "needs expecttest" if missing in session.output else f"exit code {session.code}"
        elif not row.program and f"{tests} passed" not in session.output:
            problem = "skipped tests"
        elif session.left:
            problem = f"left {session.left} processes behind"
        else:
            held = ", for its memory" if memory else ""
            so_far = f"[{self._done}/{self.planned}]"
            self._say(f"{so_far:>10}{session.wall:8.2f} s {session.cpu:8.2f} s CPU  {who}{held}")
            return session
        one.problem, one.failed = problem, problem != "needs expecttest"
        self._say(f"{who}: {problem}\n{session.output[-2000:]}")
        return None

    def missing(self, row: Row) -> str:
        """Why a row cannot be run with the plugin as it is; empty if it can."""
        if row.needs is None:
            return ""
        flag, text = row.needs
        if flag not in self._printed:
            asked = subprocess.run(
                [*pytest_command(self._ini, plugin=True), flag],
                env=_environment(0, 0, 0.0),
                capture_output=True,
                text=True,
                timeout=self._deadline,
            )
            self._printed[flag] = asked.stdout
        return "" if text in self._printed[flag] else "not available"


def _environment(world_size: int, tests: int, hold: float) -> dict[str, str]:
    """The environment of a session: one thread a process, loopback, no settings and no plugins of the user's."""
    dropped = ("DDPCHECK_", "PYTEST_", "TORCH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "OMP_", "MKL_", "COV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HARNESS_RANKS": str(world_size),
        "HARNESS_TESTS": str(tests),
        "HARNESS_HOLD": str(hold),
    }


def say_to_stderr(text: str) -> None:
    """For a person who waits."""
    print(text, file=sys.stderr, flush=True)
