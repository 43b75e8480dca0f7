"""The log that a watched rank writes: each entry is on disk before the script goes on.

So a rank that is killed, at any moment, leaves what it had to say.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.source_lines import file_of
from ddpcheck.stream.codec import encoded
from ddpcheck.stream.collective_ring import CallRing
from ddpcheck.stream.counters import Counters
from ddpcheck.stream.entries import CallersSeen, Entry, GroupUsed, RankStarted
from ddpcheck.stream.held_file import HeldFile

_MOST_CALLERS = 4096


class RankLog:
    """The log that this process writes; a process that is forked from it writes nothing.

    Attributes:
        collectives: How many of all ranks have been made, or are.
        waited: Whether this rank has waited for others since the last of them, in another way.
        loads: How many files `torch.load` has read.
        batch: The loader, the pass over it and the number of the batch that was taken last; "" before the first.
    """

    def __init__(self, folder: Path, started: RankStarted) -> None:
        name = f"{started.restart}-{started.rank}-{started.world_size}-{os.getpid()}"
        self.path = folder / f"{name}.log"
        self._steps = Counters(self.path.with_suffix(".steps"))
        self._forwards = Counters(self.path.with_suffix(".forwards"))
        self._batches = Counters(self.path.with_suffix(".batches"))
        self._calls = CallRing(self.path.with_suffix(".calls"))
        self._groups: set[str] = set()
        self._callers: dict[tuple[str, ...], int] = {}
        self.batch = ""
        self._process = os.getpid()
        self._world_size = started.world_size
        self.collectives = 0
        self.waited = False
        self.loads = 0
        self._file = HeldFile(self.path)
        self._stacks: HeldFile | None = None
        self.add(started)

    def hold_stacks(self, use: Callable[[int], object]) -> None:
        """Hold the file of stacks too; `use` is told its descriptor, and again where the script has closed it."""
        self._stacks = HeldFile(self.path.with_suffix(".stack"), use)

    def add(self, entry: Entry) -> None:
        """Write an entry; it is the last one if that fails: the folder may be gone, and with it who would read."""
        if os.getpid() != self._process:
            return
        try:
            self._file.append(encoded(entry))
            if self._stacks is not None:
                self._stacks.hold()
        except OSError as error:
            self._process = -1
            self._steps.put_error(error.errno or -1)

    def add_call(self, call: Call) -> None:
        """Write a collective that is about to be made."""
        if os.getpid() != self._process:
            return
        of_all = len(call.members) == self._world_size
        self.collectives += of_all
        self.waited = not of_all
        if call.group not in self._groups:
            self._groups.add(call.group)
            self.add(GroupUsed(call.group, call.members))
        number = self._callers.get(call.callers, len(self._callers))
        if number == len(self._callers) < _MOST_CALLERS:
            self._callers[call.callers] = number
            self.add(CallersSeen(number, call.callers, tuple(map(file_of, call.callers))))
        self._calls.add(call, number)

    def turn(self, *, begins: bool) -> None:
        """Write that this rank comes into a collective, or a wait for one; or out of it. Of its main thread."""
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._calls.turn(begins=begins)

    def wait_for(self, wait: PeerWait | None) -> None:
        """Write what this rank begins to wait for in a point-to-point call of its main thread; `None`: no more."""
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._calls.wait(wait)

    def count_batch(self, loader: int, number: int, batches: int) -> None:
        """Write that a batch was taken: how many there were, in which pass over which loader."""
        self.batch = f"batch {batches} of pass {number} over loader {loader}"
        if os.getpid() == self._process:
            self._batches.put(loader, number, batches)

    def count(self, wrapper: int, begun: int, ended: int) -> None:
        """Write how many backward passes of a wrapper have begun, and how many steps have ended."""
        self._steps.put(wrapper, begun, ended)

    def count_forward(self, wrapper: int, line: int, made: int) -> None:
        """Write that a wrapper has made a forward pass at a line, and how many there."""
        if os.getpid() == self._process:
            self._forwards.put(wrapper, line, made)
