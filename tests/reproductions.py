"""Runs reproductions as torchrun would: the same environment, one process a rank, forked from one that has torch.

`python -m tests.reproductions SCRIPT...` runs scripts and prints what came of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

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


if __name__ == "__main__":
    with Runner() as runner:
        for name in sys.argv[1:]:
            ran = runner.run(Path(name))
            print(name, ran.codes, ran.text, sep="\n", flush=True)
