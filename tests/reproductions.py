"""Runs reproductions as torchrun would: the same environment, one process a rank, forked from one that has torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ddpcheck.extras.repro import write_reproduction
from ddpcheck.findings.report import Finding, Report
from tests.launchers.slurm import free_ports

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SERVER = r"""
import json, os, runpy, sys
import torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.utils.checkpoint
torch.set_num_threads(1)
sys.modules["ddpcheck"] = None  # importing it fails


def rank(script, number, size, port, out):
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
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


for line in sys.stdin:  # a rank to fork, or one whose exit code is asked for: it has none while it runs
    task = json.loads(line)
    if "pid" in task:
        done, status = os.waitpid(task["pid"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)
        continue
    pid = os.fork()
    if not pid:
        rank(**task)
    print(pid, flush=True)
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


class _Server:
    """A process from which ranks are forked; they have its hash seed."""

    def __init__(self, hash_seed: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", **dict.fromkeys(THREADS, "1"), "PYTHONHASHSEED": hash_seed},
        )

    def ask(self, **task: object) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Runner:
    """Keeps the processes from which ranks are forked: one for even and one for odd ranks, as their hash seeds differ.

    Under torchrun every rank has another.
    """

    def __enter__(self) -> Self:
        self._servers = [_Server("1"), _Server("2")]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()

    def run(self, script: Path, world_size: int = 2, timeout: float = 60) -> Ran:
        (port,) = free_ports(1)
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(number) for number in range(world_size)]
            pids: dict[int, int] = {}
            codes: dict[int, int] = {}
            end = time.monotonic() + timeout
            try:
                for number, out in enumerate(outputs):
                    pid = self._server_of(number).ask(
                        script=str(script.resolve()), number=number, size=world_size, port=port, out=str(out)
                    )
                    assert pid is not None
                    pids[number] = pid
                while len(codes) < world_size and time.monotonic() < end:
                    time.sleep(0.02)
                    for number, code in self._ended(pids, codes).items():
                        codes[number] = code
                        if code:
                            end = min(end, time.monotonic() + 3)  # torchrun ends the others as well
            finally:
                for number in pids.keys() - codes.keys():
                    os.kill(pids[number], signal.SIGKILL)
            while len(codes) < world_size:
                codes |= self._ended(pids, codes)
            texts = [out.read_text(errors="replace") if out.exists() else "" for out in outputs]
        return Ran([codes[number] for number in range(world_size)], texts)

    def _server_of(self, rank: int) -> _Server:
        return self._servers[rank % 2]

    def _ended(self, pids: dict[int, int], codes: dict[int, int]) -> dict[int, int]:
        asked = {number: self._server_of(number).ask(pid=pids[number]) for number in pids.keys() - codes.keys()}
        return {number: code for number, code in asked.items() if code is not None}


def write(report: Report, target: str, folder: Path, finding: Finding | None = None) -> Path:
    """Write a reproduction that waits less where something hangs, and not for torchrun, which is not there."""
    script = write_reproduction(report, target, folder, finding=finding)
    text = script.read_text().replace("timedelta(seconds=20)", "timedelta(seconds=5)")
    script.write_text(text.replace("time.sleep(4 if lines else 0)", "pass"))
    return script
