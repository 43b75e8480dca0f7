"""Log of a watched rank, written before the script continues, and its reader.

A rank that is killed at any moment leaves its entries. Files received from another machine are checked first.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

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
from ddpcheck.findings.wording import group_by
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
from ddpcheck.stream.log_file import CallRing, Counters, LogFile, read_calls, read_counters, read_wait

_MOST_CALLERS = 4096


class RankLog:
    """Log written by this process; a forked process writes nothing."""

    def __init__(self, folder: Path, started: RankStarted) -> None:
        name = f"{started.restart}-{started.rank}-{started.world_size}-{os.getpid()}"
        self.path = folder / f"{name}.log"
        self._steps = Counters(self.path.with_suffix(".steps"))
        self.count = self._steps.put  # writes a wrapper's number of backward passes begun and of steps ended
        self._forwards = Counters(self.path.with_suffix(".forwards"))
        self._batches = Counters(self.path.with_suffix(".batches"))
        self._calls = CallRing(self.path.with_suffix(".calls"))
        self._groups: set[tuple[str, bool]] = set()  # (name, True if used by an autograd function)
        self._callers: dict[tuple[str, ...], int] = {}
        self.batch = ""  # loader, pass and number of the last batch in words; "" before the first batch
        self._process = os.getpid()
        self._world_size = started.world_size
        self.collectives = 0  # collectives over all ranks so far, including one in progress
        self.forwards = 0  # forward passes of wrappers that may train
        self.waited = False  # True if this rank waited in another way for ranks since the last of these collectives
        self.loads = 0  # files read by `torch.load`
        self._file = LogFile(self.path)
        self._stacks: LogFile | None = None
        self.add(started)

    def open_stack_file(self, use: Callable[[int], object]) -> None:
        """Open the file to which `faulthandler` writes stacks; pass each new descriptor to `use`."""
        self._stacks = LogFile(self.path.with_suffix(".stack"), use)

    def add(self, entry: Entry) -> None:
        """Write an entry; stop logging on failure (the folder may be gone)."""
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
        spans_world = len(call.members) == self._world_size
        self.collectives += spans_world
        self.waited = not spans_world
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

    def count_turn(self, *, begins: bool) -> None:
        """Count a turn: the main thread enters (`begins`) or leaves a collective or wait."""
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._calls.count_turn(begins=begins)

    def wait_for(self, wait: PeerWait | None) -> None:
        """Write that the main thread begins a point-to-point wait, or (None) ends it."""
        if os.getpid() == self._process and threading.current_thread() is threading.main_thread():
            self._calls.wait(wait)

    def count_batch(self, loader: int, number: int, batches: int) -> None:
        """Write the number of batches loaded in a pass over a loader."""
        self.batch = f"batch {batches} of pass {number} over loader {loader}"
        if os.getpid() == self._process:
            self._batches.put(loader, number, batches)

    def count_forward(self, wrapper: int, line: int, made: int) -> None:
        """Write that a wrapper has made `made` forward passes at source line `line`."""
        self.forwards += 1
        if os.getpid() == self._process:
            self._forwards.put(wrapper, line, made)


LARGEST_PART = 1 << 20  # max bytes per file part
_LARGEST_FOLDER = 1 << 30  # max bytes
_MOST_FILES = 1 << 14
_NAME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}){3}\.(log|steps|forwards|batches|calls|stack)")


class FilePart(Struct, frozen=True, tag=True):
    """Next bytes of a rank's file, sent to the first node."""

    name: str
    data: bytes


def file_parts(folder: Path) -> Iterator[FilePart]:
    """Yield the files of all ranks in a folder, in parts."""
    for path in sorted(folder.iterdir()):
        if _NAME.fullmatch(path.name):
            with path.open("rb") as file:
                while data := file.read(LARGEST_PART):
                    yield FilePart(path.name, data)


class ReceivedFolder:
    """New folder for the files of another machine's ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._remaining = _LARGEST_FOLDER
        self._names: set[str] = set()
        folder.mkdir()

    def append_part(self, part: FilePart) -> None:
        """Append a part of a file; raise `ValueError` (foreign name, size limits)."""
        if not _NAME.fullmatch(part.name):
            raise ValueError(f"{part.name[:80]!r} is not the name of a log")
        self._names.add(part.name)
        self._remaining -= len(part.data)
        if self._remaining < 0 or len(self._names) > _MOST_FILES:
            raise ValueError(f"the logs are more than {_LARGEST_FOLDER >> 20} MiB, or {_MOST_FILES} files")
        with (self._folder / part.name).open("ab") as file:
            file.write(part.data)


FOLDER = "ddpcheck-run-"  # prefix of a run's folder in the directory for temporary files

RESTARTED = "restarted-"  # prefix of an empty file whose name has the restart count

SCRIPT = "script"  # file with the command line of the script


class RankTrace(Struct, frozen=True, dict=True):
    """Log and counters of a rank."""

    started: RankStarted  # first entry
    entries: Sequence[Entry]  # all other entries
    counts: Sequence[tuple[int, int]]  # (backward passes begun, steps ended) by wrapper
    first_call: int = 0  # number of the first known collective
    calls: Sequence[Call] = ()  # last collectives
    stack: str = ""  # last output of `faulthandler`, or ''
    # (last pass, batches loaded in that pass) by loader
    batches: Sequence[tuple[int, int]] = ()
    # number of forward passes by line of a wrapper's last forward pass
    forwards: Mapping[int, int] = field(default_factory=dict)
    unknown: int = 0  # number of entries that this version cannot read
    waits_for: PeerWait | None = None  # current point-to-point wait, or None

    @cached_property
    def entries_by_type(self) -> dict[type[Any], list[Any]]:
        """Group the entries by class, in order."""
        return group_by(self.entries, type)

    @property
    def wrappers(self) -> list[WrapperMade]:
        """Return the wrappers in order of construction."""
        return [*self.entries_by_type.get(WrapperMade, ())]

    @property
    def is_constructing(self) -> bool:
        """Return True if the rank is inside the constructor of a wrapper."""
        entries = [entry for entry in self.entries if isinstance(entry, WrapperBegun | WrapperMade)]
        return bool(entries) and isinstance(entries[-1], WrapperBegun)

    @property
    def files(self) -> dict[str, str]:
        """Map paths as in call stacks to full paths: {"train.py": "/home/me/train.py"}."""
        entries = self.entries_by_type.get(CallersSeen, ())
        pairs = (pair for entry in entries for pair in zip(entry.lines, entry.files, strict=True))
        return {line.rpartition(":")[0]: file for line, file in pairs}

    @property
    def passes(self) -> list[LoaderPass]:
        """Return the logged passes over data loaders, each with its last batch count."""
        passes = {(entry.loader, entry.number): entry for entry in self.entries_by_type.get(LoaderPass, ())}
        for loader, (number, batches) in enumerate(self.batches):
            if (entry := passes.get((loader, number))) is not None and entry.batches < batches:
                passes[loader, number] = replace(entry, batches=batches)
        return list(passes.values())

    @property
    def has_ended(self) -> bool:
        """Return True if the script has run to its end on this rank."""
        return ProgramEnded in self.entries_by_type

    @property
    def exit_call(self) -> ExitCalled | None:
        """Return the exit call that ended the script, or None.

        If a function called by the main module raised SystemExit, the result has no line.
        """
        called: ExitCalled | None = self.entries_by_type.get(ExitCalled, [None])[-1]
        ended = self.entries_by_type.get(ProgramEnded, [None])[0]
        if called is not None and called.function == "os._exit":
            return called
        if ended is None:
            return called if called is not None and called.function != "sys.exit" else None
        if ended.how in ("raise", "call") and (called is None or ended.line not in called.lines):
            return ExitCalled((ended.line,) if ended.how == "raise" else (), SYSTEM_EXIT)
        return called if ended.how != "end" else None

    @property
    def thread_errors(self) -> list[ThreadRaised]:
        """Return the errors that ended threads other than the main thread."""
        return [*self.entries_by_type.get(ThreadRaised, ())]

    @property
    def has_left(self) -> bool:
        """Return True if the rank left the job: process group destroyed, or script ended."""
        return not self.entries_by_type.keys().isdisjoint((GroupDestroyed, ProgramEnded))


def rank_processes(folder: Path) -> dict[int, int]:
    """Return the process id of each rank since the last restart."""
    names = [tuple(map(int, path.stem.split("-"))) for path in folder.glob("*.log") if _NAME.fullmatch(path.name)]
    latest = max((restart for restart, *_ in names), default=0)
    return {rank: pid for restart, rank, _, pid in names if restart == latest}


def last_restart(folder: Path) -> int:
    """Return torchrun's number of restarts, even if no rank joined a process group."""
    return max((int(path.name.removeprefix(RESTARTED)) for path in folder.glob(f"{RESTARTED}*")), default=0)


def read_logs(folder: Path) -> list[RankTrace]:
    """Return logs since the last restart in rank order, including subfolders of other nodes."""
    nodes = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    ranks = {log.started.rank: log for node in reversed(nodes) for log in _read_node(node)}
    return [ranks[rank] for rank in sorted(ranks)]


def _read_node(folder: Path) -> list[RankTrace]:
    paths = (path for path in sorted(folder.glob("*.log")) if _NAME.fullmatch(path.name))
    logs = [log for path in paths if (log := _read_rank(path)) is not None]
    latest = max((log.started.restart for log in logs), default=0)  # nodes may count restarts independently
    return [log for log in logs if log.started.restart == latest]


def comparable_logs(ranks: Sequence[RankTrace]) -> list[Sequence[Call]]:
    """Return each rank's last collectives, from the first collective that all logs still have."""
    first = max((rank.first_call for rank in ranks), default=0)
    return [rank.calls[first - rank.first_call :] for rank in ranks]


def _read_rank(path: Path) -> RankTrace | None:
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
    lines = [line for line, count in forwards if count]
    forwards_by_line = {line: count for line, count in forwards if lines.count(line) == 1}
    wait = read_wait(path.with_suffix(".calls"))
    return RankTrace(entries[0], entries[1:], counts, first, calls, text, batches, forwards_by_line, unknown, wait)
