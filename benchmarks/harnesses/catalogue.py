"""The rows of the benchmark: what is run, and as what."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROWS = Path(__file__).parent / "rows"
SIZES = (2, 4)

FAST, FRESH, SLOW = (201, 31), (51, 11), (3, 2)  # tests of the longer session, and of a quick run


@dataclass(frozen=True, slots=True)
class Row:
    """One harness.

    Attributes:
        key: Its name on the command line and its file in `rows/`, unless `file` names another.
        title: Its name in tables.
        what: What it does for each test, in a few words.
        tests: How many tests the longer session has, and that of a quick run; by what one test costs. None: a session
            is all there is to measure.
        sizes: World sizes; 0 where there are no ranks.
        program: Run by Python itself, not by pytest.
        plugin: With ddpcheck's pytest plugin.
        arguments: More for pytest.
        needs: `--help` or `--markers`, and what pytest must print for it, for the row to be available.
    """

    key: str
    title: str
    what: str
    tests: tuple[int, int] | None
    sizes: tuple[int, ...] = SIZES
    file: str = ""
    program: bool = False
    plugin: bool = False
    arguments: tuple[str, ...] = ()
    needs: tuple[Literal["--help", "--markers"], str] | None = None

    def command(self, world_size: int, ini: Path) -> list[str]:
        """The command of one session; `ini` is an empty pytest.ini, so that no settings of ours take part."""
        path = str(ROWS / f"{self.file or self.key}.py")
        if self.program:
            return [sys.executable, path]
        return [*pytest_command(ini, self.plugin, world_size), *self.arguments, path]


def pytest_command(ini: Path, plugin: bool, world_size: int | None = None) -> list[str]:
    """Start of a pytest command without plugins, or with ours alone."""
    ours = ["-p", "ddpcheck.pytest_plugin"] if plugin else []
    if plugin and world_size is not None:
        ours.append(f"--ddp-world-size={world_size}")
    return [sys.executable, "-m", "pytest", "-q", "-c", str(ini), "-p", "no:cacheprovider", *ours]


CATALOGUE = {
    row.key: row
    for row in (
        Row("imported", "import torch", "a program that imports torch and ends", None, sizes=(0,), program=True),
        Row("empty", "pytest, empty tests", "nothing, in a file that imports torch", FAST, sizes=(0,)),
        Row(
            "alone",
            "one process alone",
            "a group of one, created, used and destroyed in the existing process",
            FAST,
            sizes=(1,),
            program=True,
        ),
        Row(
            "forked",
            "bare fork (the floor)",
            "forks ranks from a process that has imported torch; checks only their exit codes; no pytest",
            FRESH,
            program=True,
        ),
        Row("worlds", "ddpcheck.World", "a world for each test, closed after it; no pytest", FRESH, program=True),
        Row("fixture", "ddp_world", "`ddp_world.run(work)`: fresh ranks for each test", FRESH, plugin=True),
        Row(
            "marker",
            "@pytest.mark.ddp",
            "the body of the test on fresh ranks",
            FRESH,
            plugin=True,
            needs=("--markers", "@pytest.mark.ddp("),
        ),
        Row(
            "reused",
            "ddp_world, reuse=module",
            "`ddp_world.run(work)` with `--ddp-reuse=module`: the ranks of the module, a process group for each test",
            FRESH,
            file="fixture",
            plugin=True,
            arguments=("--ddp-reuse=module",),
            needs=("--help", "--ddp-reuse"),
        ),
        Row(
            "one_world",
            "ddpcheck.World, kept open",
            "one world that runs every test: same ranks, same process group; no pytest",
            FAST,
            program=True,
        ),
        Row(
            "threaded",
            "MultiThreadedTestCase",
            "torch's: threads of the test's own process, collectives simulated in its memory",
            FAST,
        ),
        Row(
            "continuous",
            "MultiProcContinuousTest",
            "torch's: ranks and process group spawned once for the class, shared by its tests",
            FAST,
        ),
        Row("spawned", "torch.multiprocessing.spawn", "ranks spawned for each test", SLOW),
        Row("pooled", "DeepSpeed's DistributedTest", "a pool of processes for each test (our stand-in for it)", SLOW),
        Row("launched", "torchrun", "`torchrun --standalone --nproc-per-node W` for each test", SLOW),
        Row("multi_process", "MultiProcessTestCase", "torch's: ranks spawned for each test", SLOW),
    )
}
FLOOR, OURS = "forked", "fixture"
