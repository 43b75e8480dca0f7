"""Watches from outside whether the ranks of a script get on, and ends it when all that live wait for each other.

This module is light: it never imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.findings.stacks import own_stack, waits_for_others
from ddpcheck.judge.collective_order import judge_collectives
from ddpcheck.monitor.script.environment import STACK_SIGNAL
from ddpcheck.monitor.script.held_file import is_held
from ddpcheck.monitor.script.rank_log import comparable_logs, read_logs
from ddpcheck.worlds.deadlock import processor_seconds

_INTERVAL = 0.5  # seconds between two looks
_SHARE = 0.02  # of a core that a rank may use while it waits
_FOR_STACKS = 1.0  # seconds
_MISMATCH = 5.0  # seconds without progress, where collectives are known not to match


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that have not got on; `stacks` of those that live, by rank."""

    seconds: float
    stacks: dict[int, str]


class HangWatch:
    """A thread that looks at the logs of the ranks; on Linux, where it can see whether a rank works."""

    def __init__(self, folder: Path, timeout: float, end: Callable[[], object]) -> None:
        """Begin; `end` is called once the ranks wait for each other and have not got on for `timeout` seconds."""
        self.hang: Hang | None = None
        self._folder = folder
        self._timeout = timeout
        self._end = end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ddpcheck-hang-watch", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_FOR_STACKS + 2 * _INTERVAL)

    def _look(self) -> None:
        seen: tuple[bytes, ...] = ()
        since, used = 0.0, dict[int, float]()
        while not self._over.wait(_INTERVAL):
            try:
                ranks = self._living()
                now, before = time.monotonic(), seen
                seen = self._progress()
                if not ranks or seen != before:
                    since, used = now, {pid: processor_seconds(pid) or 0.0 for pid in ranks.values()}
                elif now - since >= self._timeout or (now - since >= _MISMATCH and self._do_not_match(ranks)):
                    if self._are_idle(ranks, used, now - since) and (stacks := self._stacks(ranks)):
                        self.hang = Hang(now - since, stacks)
                        self._end()
                        return
                    since, used = now, {pid: processor_seconds(pid) or 0.0 for pid in ranks.values()}
            except OSError:  # a rank has just ended
                seen = ()

    def _living(self) -> dict[int, int]:
        """The processes of the ranks of the last start that live, by rank."""
        names = [tuple(map(int, path.stem.split("-"))) for path in self._folder.glob("*.log")]
        last = max((restart for restart, *_ in names), default=0)
        ranks = [(rank, pid) for restart, rank, _, pid in names if restart == last]
        if len(ranks) < max((world_size for _, _, world_size, _ in names), default=1):
            return {}  # one has not begun, or is on another machine, where it may be at work
        return {rank: pid for rank, pid in ranks if os.path.exists(f"/proc/{pid}")}

    def _do_not_match(self, living: Collection[int]) -> bool:
        """Whether ranks have come to collectives that do not match: waiting longer would not help."""
        return bool(judge_collectives(comparable_logs(read_logs(self._folder)), living))

    def _progress(self) -> tuple[bytes, ...]:
        """What grows as long as a rank gets on: steps, batches, collectives, entries of the log."""
        found = []
        for path in sorted(self._folder.glob("*.*")):
            if path.suffix == ".log":
                found.append(str(path.stat().st_size).encode())
            elif path.suffix in (".steps", ".batches", ".calls"):
                with path.open("rb") as file:
                    found.append(file.read(8 if path.suffix == ".calls" else 256))
        return tuple(found)

    @staticmethod
    def _are_idle(ranks: dict[int, int], used: dict[int, float], seconds: float) -> bool:
        allowed = 0.1 + _SHARE * seconds
        now = {pid: processor_seconds(pid) for pid in ranks.values()}
        return all(after is not None and after - used.get(pid, 0.0) <= allowed for pid, after in now.items())

    def _stacks(self, ranks: dict[int, int]) -> dict[int, str]:
        """The stacks of the ranks, where each of them waits for others; a slow read of a file is no hang."""
        files = {rank: next(self._folder.glob(f"*-{rank}-*-{pid}.stack")) for rank, pid in ranks.items()}
        if not all(is_held(files[rank], pid) for rank, pid in ranks.items()):
            return {}  # the script has closed it: the stack would go to a file of its own
        for rank, pid in ranks.items():
            os.truncate(files[rank], 0)
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _FOR_STACKS
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files.values()):
            time.sleep(0.01)
        time.sleep(0.05)  # for the last lines
        stacks = {rank: file.read_text("utf-8", "replace") for rank, file in files.items()}
        return stacks if all(waits_for_others(own_stack(stack)) for stack in stacks.values()) else {}


def end_agent() -> None:
    """Have torchrun's agent, which this process is, end the ranks."""
    os.kill(os.getpid(), signal.SIGTERM)
