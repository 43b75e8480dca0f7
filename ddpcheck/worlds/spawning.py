"""Starting ranks by exec, each as a process of its own: where a fork is unsafe. Light: never imports torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from ddpcheck.worlds.starting import Event, import_path, inherited_environment, interpreter, kill_group

_RANK_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from ddpcheck.worlds.rank import main_spawned; main_spawned(int(sys.argv[1]), int(sys.argv[2]))"
)


class SpawnedRanks:
    """Ranks started by exec with a hash seed, each a child of ours; each imports what is to be preloaded by itself."""

    def __init__(
        self, directory: str, fds: Mapping[int, int], hash_seed: str, preload: Sequence[str], ahead: bool
    ) -> None:
        self.channel: socket.socket | None = None
        self.over = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._news: list[Event] = []
        path = json.dumps(import_path())
        for rank, fd in fds.items():
            with open(os.path.join(directory, f"rank{rank}.out"), "ab") as output:
                self._processes[rank] = subprocess.Popen(
                    [*interpreter(), "-c", _RANK_CODE, str(fd), str(os.getpid()), path],
                    env={**inherited_environment(), "PYTHONHASHSEED": hash_seed},
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        self._news.append(("forked", [(rank, process.pid) for rank, process in self._processes.items()]))

    def events(self) -> list[Event]:
        news, self._news = self._news, []
        for rank, process in list(self._processes.items()):
            if not _has_ended(process):
                continue
            kill_group(process.pid)  # what the rank has started; the zombie keeps the number ours
            code = process.wait()
            del self._processes[rank]
            news.append(("exit", rank, code, time.monotonic()))
        return news

    def signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            process = self._processes.get(rank)
            if process is None:
                continue
            if number == signal.SIGKILL:
                kill_group(process.pid)
            process.send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            kill_group(process.pid)
            process.kill()
            process.wait()
        self._processes.clear()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if hasattr(os, "waitid"):
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            pass
    return process.poll() is not None
