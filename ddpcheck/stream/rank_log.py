"""The log that a watched rank writes, each entry on disk before the script goes on; and how those of all are read.

So a rank that is killed, at any moment, leaves what it had to say. What another machine sends is checked first.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.endings import SYSTEM_EXIT, PeerWait
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.files import MOST_RANKS, read_file
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import file_of
from ddpcheck.stream.codec import decoded, encoded
from ddpcheck.stream.entries import (
    CallersSeen,
    ExitCalled,
    GroupDestroyed,
    GroupUsed,
    ProgramEnded,
    RankStarted,
    ThreadRaised,
    WatchingFailed,
    WrapperMade,
)
from ddpcheck.stream.held_file import CallRing, Counters, HeldFile, read_calls, read_counters, read_wait

_MOST_CALLERS = 4096


class RankLog:
    """The log that this process writes; a process that is forked from it writes nothing.

    Attributes:
        count: Writes, of a wrapper by its number, how many backward passes have begun and how many steps have ended.
        collectives: How many of all ranks have been made, or are.
        forwards: How many forward passes wrappers have made that may train.
        waited: Whether this rank has waited for others since the last of them, in another way.
        loads: How many files `torch.load` has read.
        batch: The loader, the pass over it and the number of the batch that was taken last; "" before the first.
    """

    def __init__(self, folder: Path, started: RankStarted) -> None:
        name = f"{started.restart}-{started.rank}-{started.world_size}-{os.getpid()}"
        self.path = folder / f"{name}.log"
        self._steps = Counters(self.path.with_suffix(".steps"))
        self.count = self._steps.put
        self._forwards = Counters(self.path.with_suffix(".forwards"))
        self._batches = Counters(self.path.with_suffix(".batches"))
        self._calls = CallRing(self.path.with_suffix(".calls"))
        self._groups: set[tuple[str, bool]] = set()  # and whether a function of autograd has used it
        self._callers: dict[tuple[str, ...], int] = {}
        self.batch = ""
        self._process = os.getpid()
        self._world_size = started.world_size
        self.collectives = self.forwards = 0
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
        if (call.group, False) not in self._groups:
            self._groups.add((call.group, False))
            self.add(GroupUsed(call.group, call.members, words=call.group_words))
        if call.differentiable and (call.group, True) not in self._groups:
            self._groups.add((call.group, True))
            self.add(GroupUsed(call.group, call.members, Location.parse(call.location)))
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

    def count_forward(self, wrapper: int, line: int, made: int) -> None:
        """Write that a wrapper has made a forward pass at a line, and how many there."""
        self.forwards += 1
        if os.getpid() == self._process:
            self._forwards.put(wrapper, line, made)


LARGEST_PART = 1 << 20  # bytes of a file in one part
_LARGEST_FOLDER = 1 << 30  # bytes
_MOST_FILES = 1 << 14
_NAME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}){3}\.(log|steps|forwards|batches|calls|stack)")


class FilePart(Struct, frozen=True, tag=True):
    """The next bytes of a file of a rank."""

    name: str
    data: bytes


def parts_of(folder: Path) -> Iterator[FilePart]:
    """What all ranks have left in a folder."""
    for path in sorted(folder.iterdir()):
        if _NAME.fullmatch(path.name):
            with path.open("rb") as file:
                while data := file.read(LARGEST_PART):
                    yield FilePart(path.name, data)


class ReceivedFolder:
    """A new folder of what the ranks of another machine have left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = _LARGEST_FOLDER
        self._names: set[str] = set()
        folder.mkdir()

    def take(self, part: FilePart) -> None:
        """Write the next part of a file.

        Raises:
            ValueError: It is no part of a log, or the limits of a folder have been reached.
        """
        if not _NAME.fullmatch(part.name):
            raise ValueError(f"{part.name[:80]!r} is not the name of a log")
        self._names.add(part.name)
        self._left -= len(part.data)
        if self._left < 0 or len(self._names) > _MOST_FILES:
            raise ValueError(f"the logs are more than {_LARGEST_FOLDER >> 20} MiB, or {_MOST_FILES} files")
        with (self._folder / part.name).open("ab") as file:
            file.write(part.data)


FOLDER = "ddpcheck-run-"  # how the name of a run's folder begins, in the directory for temporary files

RESTARTED = "restarted-"  # how the name of an empty file begins that says which restart there was

SCRIPT = "script"  # the file in it that holds the command line of the script


class WatchedRank(Struct, frozen=True):
    """What one rank has left."""

    started: RankStarted  # who it was
    entries: Sequence[Entry]  # all others of its log
    counts: Sequence[tuple[int, int]]  # by wrapper, how many backward passes have begun and how many steps have ended
    first_call: int = 0  # the number of the first collective of those that are known
    calls: Sequence[Call] = ()  # the last collectives
    stack: str = ""  # what `faulthandler` has written last; may be empty
    # by loader, the number of its last pass and how many batches were taken in it
    batches: Sequence[tuple[int, int]] = ()
    # by the number of the line of a wrapper's last forward pass, how many it has made there
    forwards: Mapping[int, int] = field(default_factory=dict)
    unknown: int = 0  # how many entries this version cannot read
    waits_for: PeerWait | None = None  # what it waits for in a point-to-point call, if that is what it does

    @property
    def wrappers(self) -> list[WrapperMade]:
        """In the order of construction."""
        return [entry for entry in self.entries if isinstance(entry, WrapperMade)]

    @property
    def constructs(self) -> bool:
        """Whether the rank has come into the constructor of a wrapper, and not out of it."""
        around = [entry for entry in self.entries if isinstance(entry, WrapperBegun | WrapperMade)]
        return bool(around) and isinstance(around[-1], WrapperBegun)

    @property
    def files(self) -> dict[str, str]:
        """The files of the program's lines that have led to collectives, by how reports call them."""
        seen = [entry for entry in self.entries if isinstance(entry, CallersSeen)]
        pairs = (pair for entry in seen for pair in zip(entry.lines, entry.files, strict=True))
        return {line.rpartition(":")[0]: file for line, file in pairs}

    @property
    def passes(self) -> list[LoaderPass]:
        """The passes over its data loaders, each as far as the rank came."""
        found = {(one.loader, one.number): one for one in self.entries if isinstance(one, LoaderPass)}
        for loader, (number, batches) in enumerate(self.batches):
            if (one := found.get((loader, number))) is not None and one.batches < batches:
                found[loader, number] = replace(one, batches=batches)
        return list(found.values())

    @property
    def has_ended(self) -> bool:
        """Whether all of the script has run on it."""
        return any(isinstance(entry, ProgramEnded) for entry in self.entries)

    @property
    def exit(self) -> ExitCalled | None:
        """What has ended it, where the script has: `sys.exit` raises, and may have been caught.

        Without a line where `SystemExit` was raised in what the main module has called.
        """
        called = next((entry for entry in reversed(self.entries) if isinstance(entry, ExitCalled)), None)
        ended = next((entry for entry in self.entries if isinstance(entry, ProgramEnded)), None)
        if called is not None and called.function == "os._exit":
            return called
        if ended is None:
            return called if called is not None and called.function != "sys.exit" else None
        if ended.how in ("raise", "call") and (called is None or ended.line not in called.lines):
            return ExitCalled((ended.line,) if ended.how == "raise" else (), SYSTEM_EXIT)
        return called if ended.how != "end" else None

    @property
    def thread_errors(self) -> list[ThreadRaised]:
        """What has ended threads beside its main one."""
        return [entry for entry in self.entries if isinstance(entry, ThreadRaised)]

    @property
    def has_left(self) -> bool:
        """Whether it needs the other ranks no more: its script has destroyed the process group, or has ended."""
        return any(isinstance(entry, GroupDestroyed | ProgramEnded) for entry in self.entries)


def rank_processes(folder: Path) -> dict[int, int]:
    """The processes of the last start of the ranks, by rank."""
    names = [tuple(map(int, path.stem.split("-"))) for path in folder.glob("*.log") if _NAME.fullmatch(path.name)]
    last = max((restart for restart, *_ in names), default=0)
    return {rank: pid for restart, rank, _, pid in names if restart == last}


def last_restart(folder: Path) -> int:
    """How often torchrun has started the ranks again, whether or not they have come to a process group then."""
    return max((int(path.name.removeprefix(RESTARTED)) for path in folder.glob(f"{RESTARTED}*")), default=0)


def read_logs(folder: Path) -> list[WatchedRank]:
    """The logs of the last start of the ranks, by rank; those of other nodes are in folders of their own."""
    nodes = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    ranks = {one.started.rank: one for node in reversed(nodes) for one in _read_node(node)}
    return [ranks[rank] for rank in sorted(ranks)]


def _read_node(folder: Path) -> list[WatchedRank]:
    logs = (path for path in sorted(folder.glob("*.log")) if _NAME.fullmatch(path.name))
    found = [one for path in logs if (one := _read(path)) is not None]
    last = max((one.started.restart for one in found), default=0)  # nodes may count apart
    return [one for one in found if one.started.restart == last]


def comparable_logs(ranks: Sequence[WatchedRank]) -> list[Sequence[Call]]:
    """The last collectives of each rank, from the first that is known of all of them."""
    first = max((rank.first_call for rank in ranks), default=0)
    return [rank.calls[first - rank.first_call :] for rank in ranks]


def _read(path: Path) -> WatchedRank | None:
    entries, unknown = decoded(read_file(path))
    if not entries or not isinstance(entries[0], RankStarted) or entries[0].world_size > MOST_RANKS:
        return None
    counts, lost = read_counters(path.with_suffix(".steps"))
    batches, _ = read_counters(path.with_suffix(".batches"))
    forwards, _ = read_counters(path.with_suffix(".forwards"))
    if lost:
        entries.append(WatchingFailed(f"its log was lost: {os.strerror(lost)}"))
    groups = {entry.name: entry for entry in reversed(entries) if isinstance(entry, GroupUsed)}
    callers = {str(entry.number): entry.lines for entry in entries if isinstance(entry, CallersSeen)}
    first, calls = read_calls(path.with_suffix(".calls"), groups, callers)
    stack = path.with_suffix(".stack")
    text = read_file(stack).decode("utf-8", "replace") if stack.exists() else ""
    lines = [line for line, made in forwards if made]
    return WatchedRank(
        entries[0],
        entries[1:],
        counts,
        first,
        calls,
        text,
        batches,
        {line: made for line, made in forwards if lines.count(line) == 1},
        unknown,
        read_wait(path.with_suffix(".calls")),
    )
