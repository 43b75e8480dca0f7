"""Runs reproductions as torchrun would: the same environment, one process a rank, forked from one that has torch.

`python -m tests.reproductions` writes and runs one for every fault of the zoo and of `examples/faults/`, and puts the
repaired twins of the latter through the same demonstrations; it prints what came of each, and fails where a fault does
not show or a twin shows one. It takes about five minutes, and is for changes of the demonstrations.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ddpcheck.check import check
from ddpcheck.errors import DdpcheckError
from ddpcheck.findings import Finding, Report
from ddpcheck.repro import write_reproduction
from ddpcheck.repro.choice import world_size_for
from tests.faultsuite.cases import all_cases

ROOT = Path(__file__).parents[1]

SERVER = r"""
import json, os, runpy, signal, socket, sys, tempfile, time
import torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.utils.checkpoint
torch.set_num_threads(1)
sys.modules["ddpcheck"] = None  # importing it fails


def rank(script, number, size, port, out):
    os.setpgid(0, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    folder = os.path.dirname(script)
    os.chdir("/")
    sys.argv, sys.path[0] = [script], folder
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    task = json.loads(line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [tempfile.TemporaryFile() for _ in range(task["size"])]
    pids = []
    for number, file in enumerate(files):
        pid = os.fork()
        if not pid:
            rank(task["script"], number, task["size"], port, file.fileno())
        pids.append(pid)
    codes, deadline, ending = {}, time.monotonic() + task["timeout"], None
    while len(codes) < len(pids):
        for number, pid in enumerate(pids):
            if number not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[number] = os.waitstatus_to_exitcode(status)
                    if codes[number] and ending is None:
                        ending = time.monotonic() + 3  # torchrun ends the others as well
        if time.monotonic() > min(deadline, ending or deadline):
            for number, pid in enumerate(pids):
                if number not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read().decode(errors="replace"))
    print(json.dumps({"codes": [codes[n] for n in range(len(pids))], "outputs": outputs}), flush=True)
"""


@dataclass(frozen=True)
class Ran:
    """What came of a script: exit codes and outputs by rank."""

    codes: list[int]
    outputs: list[str]

    @property
    def shows(self) -> bool:
        """Whether torchrun would have failed."""
        return any(self.codes)

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)


class Runner:
    """Keeps the process from which ranks are forked."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def run(self, script: Path, world_size: int = 2, timeout: float = 60) -> Ran:
        assert self._process.stdin is not None and self._process.stdout is not None
        task = {"script": str(script.resolve()), "size": world_size, "timeout": timeout}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return Ran(**json.loads(self._process.stdout.readline()))


def write(report: Report, target: str, folder: Path, finding: Finding | None = None) -> Path:
    """Write a reproduction, with a short wait where something hangs."""
    script = write_reproduction(report, target, folder, finding=finding)
    script.write_text(re.sub(r"^TIMEOUT = 20 ", "TIMEOUT = 5 ", script.read_text(), flags=re.MULTILINE))
    return script


def main() -> int:
    """Run all of them."""
    zoo = [(str(path), "", 2, 3) for path in sorted((ROOT / "tests/zoo/broken").glob("*.py"))]
    faults = [(f"{c.path}:broken", f"{c.path}:fixed", c.expected.world_size, c.expected.steps) for c in all_cases()]
    wrong = 0
    with Runner() as runner, tempfile.TemporaryDirectory() as folder:
        for number, (target, twin, world_size, steps) in enumerate(zoo + faults):
            report = check(target, world_size=world_size, steps=steps, timeout=8)
            name = Path(target.partition(":")[0]).stem
            if not report.findings:
                print(f"{name}: no finding: {report.status}", flush=True)
                continue
            try:
                size = world_size_for(report.findings[0], report)
                broken = runner.run(write(report, target, Path(folder) / f"{number}"), size)
                fixed = None
                if twin:
                    fixed = runner.run(write(report, twin, Path(folder) / f"{number}-fixed", report.findings[0]), size)
            except DdpcheckError as error:
                broken, fixed = Ran([], [f"{type(error).__name__}: {error}"]), None
            bad = not broken.shows or (fixed is not None and fixed.shows)
            wrong += bad
            codes = f"{broken.codes} {fixed.codes if fixed else ''}"
            print(f"{'WRONG ' if bad else ''}{report.findings[0].code} {name}: {codes}", flush=True)
            if bad:
                print(textwrap.indent(f"{broken.text}\n{fixed.text if fixed else ''}", "    "), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
