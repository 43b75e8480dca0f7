"""`ddpcheck run` on ranks forked from a process that has imported torch, which takes each of them seconds otherwise.

The command runs as it is, but for torchrun's agent: `_launch` stands in its place, which has the ranks run the script.
The ranks are watched like others, but have one hash seed, and did not start as interpreters. For what is about that, or
about the agent, there is `run` in tests/run/test_run.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Compiled under no file's name: on the stacks of ranks, ddpcheck takes its lines for none of the program.
_SELF = f"__file__ = {__file__!r}; exec(compile(open(__file__).read(), '<forked>', 'exec'))"
_IMPORTED = (
    *("numpy", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.optim"),
    *("ddpcheck.cli.run", "ddpcheck.run.script_report", "ddpcheck.record.rank.rank_watch"),
    "torch._dynamo.convert_frame",  # which the first optimizer imports
)
_SINGLES = 3  # processes for runs in a single one
_GRACE = 30.0  # seconds that ranks have to end after SIGTERM, as torchrun's have


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """The process that ranks are forked from; it ends with this one."""
    path = os.pathsep.join([str(ROOT / "ddpcheck" / "record" / "rank" / "on_path"), str(ROOT)])
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", _SELF],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # `select` is to see what has not been read
    )
    atexit.register(server.communicate)
    return server


def run_forked(
    *command: str, ranks: int = 2, cwd: Path = ROOT, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`ddpcheck run` with options, a script and its arguments; once more where gloo has aborted a rank at its exit."""
    words = ["run", "--standalone", f"--nproc-per-node={ranks}", *command]
    for _ in range(3):
        ended = _run_once(words, ranks, cwd, timeout, {**os.environ, **variables, "OMP_NUM_THREADS": "1"})
        if "terminate called without an active exception" not in ended.stderr:
            break
    return ended


def _run_once(
    words: list[str], ranks: int, cwd: Path, timeout: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        server.stdin.write(json.dumps([words, ranks, environment, str(cwd), *map(str, said)]).encode() + b"\n")
        job = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(job, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in said))


# The server


def _serve() -> None:
    """Fork a process for each command, one after the other, and ranks for it."""
    _import_all()
    for line in sys.stdin:
        words, count, environment, cwd, *said = json.loads(line)
        if job := os.fork():
            print(job)
            print(os.waitpid(job, 0)[1])
            continue
        os.setsid()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        for number, path in enumerate(said, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ranks: dict[int, int] = {}
        for _ in range(count + _SINGLES * ("--check-parity" in words)):
            read, write = os.pipe()
            if not (pid := os.fork()):
                for one in (write, *ranks.values()):
                    os.close(one)
                return _be_rank(read)
            os.close(read)
            ranks[pid] = write
        sys.exit(_run(words, ranks))


def _import_all() -> None:
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def _run(words: list[str], ranks: dict[int, int]) -> int:
    import torch.distributed.run

    from ddpcheck.cli import main

    torch.distributed.run.run = functools.partial(_launch, ranks)
    return main(words)


def _launch(processes: dict[int, int], given: Any) -> None:
    """What torchrun's agent does: have the ranks run the script, and end all of them once one has failed."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def on_signal(number: int, _frame: object) -> None:
        raise SignalException(f"got {number}", signal.Signals(number))

    signal.signal(signal.SIGTERM, on_signal)
    ranks = {pid: processes.pop(pid) for pid in [*processes][: int(given.nproc_per_node)]}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = str(len(ranks))
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        files = {pid: f"{folder}/{rank}.json" for rank, pid in enumerate(ranks)}
        living = dict(zip(ranks, range(len(ranks)), strict=True))
        try:
            for (pid, rank), pipe in zip(living.items(), ranks.values(), strict=True):
                own = {"_OUTPUT": f"{given.log_dir}/std.log"} if given.redirects == "3" else {}
                own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": files[pid]}
                script = [given.training_script, *given.training_script_args]
                with open(pipe, "w") as file:
                    json.dump([script, {**os.environ, **world, **own}], file)
            while living:
                failed = {rank: ended for rank, *ended in _ended(living) if ended[1]}
                if failed:
                    failures = {
                        rank: ProcessFailure(rank, pid, code, files[pid]) for rank, (pid, code) in failed.items()
                    }
                    raise ChildFailedError(given.training_script, failures)
                time.sleep(0.02)
        finally:
            _end(living)


def _ended(living: dict[int, int]) -> list[tuple[int, int, int]]:
    """Of the ranks that have ended: rank, process and exit code; they are taken out of `living`."""
    found = [(pid, *os.waitpid(pid, os.WNOHANG)) for pid in living]
    return [(living.pop(pid), pid, os.waitstatus_to_exitcode(status)) for pid, ended, status in found if ended]


def _end(living: dict[int, int]) -> None:
    for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while living and time.monotonic() < deadline:
            _ended(living)
            time.sleep(0.02)


def _be_rank(pipe: int) -> None:
    """Run the script in this process, as an interpreter does."""
    import torch
    from numpy.random import MT19937, mtrand

    from ddpcheck.record.data import constructions
    from ddpcheck.record.rank import arming, started_processes

    with open(pipe) as file:
        text = file.read()
    if not text:  # the command was refused
        os._exit(0)
    (script, *arguments), environment = json.loads(text)
    if output := environment.pop("_OUTPUT", ""):
        Path(output).parent.mkdir(exist_ok=True)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    path = environment["PYTHONPATH"].split(os.pathsep)[1:]  # of which Python would have taken the first off
    sys.path[:1] = [str(Path(script).absolute().parent), *(folder for folder in path if folder not in sys.path)]
    started_processes.mark_first_process()
    arming.record_parity()
    torch.default_generator.seed()  # as at its import; by no function of which the line would be noted as the script's
    mtrand._rand._bit_generator.state = MT19937().state
    for generator in ("python", "numpy"):  # which a fork, or the line above, has changed
        constructions.begin_history(generator)
    sys.argv = [script, *arguments]
    runpy.run_path(str(Path(script).absolute()), run_name="__main__")


if __name__ == "__main__":
    _serve()
