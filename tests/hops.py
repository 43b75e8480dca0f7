"""How far it is from a door to a finding: what of ddpcheck five paths come through, as a table in Markdown.

python -m tests.hops                all of them; a minute
python -m tests.hops hang           those whose name begins like this, with their chains

Python's profile function is told of every call: in the process that reports, from the door on until the path ends, and
on its ranks, from the import of the target on. Files are those of ddpcheck in which a function was called, in all of
these. A hop is a call, perhaps by way of torch or of the user's code, from one of these files to another one. Those of
a path are those of the chain of calls in which it ends, and of the longest chain on a rank.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OWN = str(ROOT / "ddpcheck") + os.sep
FOLDER, ENDS = "HOPS_FOLDER", "HOPS_ENDS"  # of the environment: where processes write, and the end of the path
RANK = "from tests.hops import follow\n\nfollow()\n"
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)

"""
RECIPE = """
from ddpcheck import Recipe

target = Recipe(model=Net, batch=lambda step: torch.ones(4, 4), loss=lambda model, batch: model(batch).sum())
"""
TEST = """
import pytest
from ddpcheck import assert_no_anomalous_params


@pytest.mark.ddp(world_size=2)
def test_net():
    model = nn.parallel.DistributedDataParallel(Net())
    assert_no_anomalous_params(model(torch.ones(2, 4)).sum(), model)
"""
WRAPPER = """
import torch.distributed as dist
from ddpcheck import CheckedDistributedDataParallel
from tests.hops import follow

dist.init_process_group("gloo")
follow("reports")
CheckedDistributedDataParallel(Net(), detect_anomalous_params=True)(torch.ones(2, 4)).sum().backward()
"""
LAUNCH = ("--standalone", "--nproc-per-node", "2")


class Way(NamedTuple):
    """A path: what is called, the target that is written for it, and its end.

    That is a code, of which a finding is made; or a file of ddpcheck with a function, which is called.
    """

    name: str
    command: tuple[str, ...]
    target: str
    ends: str


def _script(name: str) -> str:
    return (ROOT / "examples" / "scripts" / name).read_text(encoding="utf-8")


WAYS = (
    Way("report to DDP101", ("ddpcheck", "report", "target.py:target"), RANK + NET + RECIPE, "DDP101"),
    Way("run to DDP502", ("ddpcheck", "run", *LAUNCH, "target.py"), RANK + _script("always_no_sync.py"), "DDP502"),
    Way(
        "hang in run to its page",
        ("ddpcheck", "run", "--check-timeout", "5", "--check-output", "page.html", *LAUNCH, "target.py"),
        RANK + _script("uneven_batches.py"),
        "render/page/page.py render",
    ),
    Way(
        "marked test to its text",
        ("pytest", "-p", "no:cacheprovider", "target.py"),
        RANK + NET + TEST,
        "testing/outcome.py as_pytest_shows",
    ),
    Way("`detect_anomalous_params` in the wrapper", ("torchrun", *LAUNCH, "target.py"), NET + WRAPPER, "DDP101"),
)


class Follower:
    """A profile function: writes down each file of ddpcheck that is entered, and each chain that is the longest yet."""

    def __init__(self, role: str, frame: FrameType) -> None:
        """Begin below `frame`."""
        self._out = open(Path(os.environ[FOLDER], f"{role}-{os.getpid()}"), "a", buffering=1, encoding="utf-8")
        self._ends = os.environ[ENDS] if role == "reports" else ""
        self._files: set[str] = set()
        self._longest = 0
        self._chains: list[tuple[str, ...]] = [()]
        for one, _ in reversed(list(traceback.walk_stack(frame))):
            self._enter(one)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """A call, or a return from one."""
        if event == "call":
            self._enter(frame)
            if self._ends and self._is_end(frame):
                print("end", *self._chains[-1], file=self._out)
                sys.setprofile(None)
        elif event == "return" and len(self._chains) > 1:
            self._chains.pop()

    def _enter(self, frame: FrameType) -> None:
        chain = self._chains[-1]
        file = frame.f_code.co_filename
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # the body of a module or a class is none
        if is_function and file.startswith(OWN) and chain[-1:] != (file,):
            chain = (*chain, file)
            if file not in self._files:
                self._files.add(file)
                print("file", file, file=self._out)
            if len(chain) > self._longest:
                self._longest = len(chain)
                print("chain", *chain, file=self._out)
        self._chains.append(chain)

    def _is_end(self, frame: FrameType) -> bool:
        file, _, function = self._ends.partition(" ")
        if function:
            return frame.f_code.co_name == function and frame.f_code.co_filename == OWN + file
        if frame.f_code.co_filename != "<string>" or frame.f_code.co_name != "__init__":
            return False
        return type(frame.f_locals.get("self")).__name__ == "Finding" and frame.f_locals.get("code") == self._ends


def follow(role: str = "rank") -> None:
    """Count from here on in this process, if paths are counted, and it is not one that reports already."""
    if FOLDER in os.environ and (role == "reports" or sys.getprofile() is None):
        sys.setprofile(Follower(role, sys._getframe(1)))


def counted(way: Way) -> tuple[int, list[str], list[str]]:
    """How many files a path comes through; the chain in which it ends, and the longest one on a rank."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "written")
        written.mkdir()
        Path(folder, "target.py").write_text(way.target, encoding="utf-8")
        env = {**os.environ, FOLDER: str(written), ENDS: way.ends, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        launched = [sys.executable, "-m", __spec__.name, "--door", *way.command]
        subprocess.run(launched, cwd=folder, env=env, capture_output=True, timeout=300, check=False)
        files: set[str] = set()
        chains: dict[str, list[str]] = {"end": [], "rank": []}
        for path in written.iterdir():
            for line in path.read_text(encoding="utf-8").splitlines():
                kind, *named = line.split(" ")
                role = "end" if kind == "end" else "rank" if path.name.startswith("rank") else ""
                files.update(named if kind == "file" else ())
                if kind != "file" and role and len(named) > len(chains[role]):
                    chains[role] = named
    return len(files), chains["end"], chains["rank"]


def door(command: list[str]) -> None:
    """Open it in this process."""
    name, *arguments = command
    if name == "torchrun":
        from torch.distributed.run import main
    elif name == "pytest":
        from pytest import main
    else:
        from ddpcheck.cli import main  # type: ignore[assignment]
    if name != "torchrun":  # where the ranks report
        follow("reports")
    main(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--door"]:
        door(sys.argv[2:])
    else:
        print("| path | files | hops | of them on a rank |\n|---|---|---|---|")
        for way in WAYS:
            if way.name.startswith(tuple(sys.argv[1:]) or ""):
                number, end, rank = counted(way)
                on_rank = max(0, len(rank) - 1)
                print(f"| {way.name} | {number} | {max(0, len(end) - 1) + on_rank} | {on_rank} |")
                for chain in (end, rank) if sys.argv[1:] else ():
                    print("    " + " > ".join(file.removeprefix(OWN) for file in chain))
