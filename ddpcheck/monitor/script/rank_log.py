"""The log that a watched rank leaves: what a watch would have exchanged with the others, for a judge who comes later.

Each entry is on disk before the script goes on, so that a rank that is killed leaves what it had to say.

This module is light: it never imports torch.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ddpcheck.findings.evidence.changes import ModuleChanged
from ddpcheck.findings.evidence.construction import WrapperBegun
from ddpcheck.findings.evidence.draws import StepDraw
from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    GatheredTargets,
    MetricShown,
    ResultExchanged,
    RowsCompared,
)
from ddpcheck.findings.evidence.gathers import GatheredConstant, OwnPartPutBack
from ddpcheck.findings.evidence.gradient_changes import GradientsChanged, GradientsTaken
from ddpcheck.findings.evidence.pace import GradientsLeft, PaceRun
from ddpcheck.findings.evidence.running_statistics import RunningStatistic
from ddpcheck.findings.evidence.script import (
    DerivedTable,
    FileUsed,
    GradientsClipped,
    GradientsZeroed,
    Inputs,
    LoaderPass,
    LossDifferentiated,
    MetricUsed,
    OptimizerEnd,
    OptimizerStep,
    ReducedInPlace,
    StateHeld,
)
from ddpcheck.findings.evidence.state_uses import StateUsed
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import file_of
from ddpcheck.monitor.judging import WatchContext
from ddpcheck.monitor.rank_report import RankReport, ReplicaState
from ddpcheck.monitor.script.collective_ring import CallRing, read_calls
from ddpcheck.monitor.script.held_file import HeldFile, mapped_file

_MOST_WRAPPERS = 256
_COUNTS = struct.Struct("<qq")  # of a wrapper: backward passes that have begun, steps that have ended
_FORWARDS = struct.Struct("<qq")  # and the number of the line of its last forward pass, how many it has made there
_LOST = _MOST_WRAPPERS * _COUNTS.size  # where the number of the error is that has ended the log
_MOST_LOADERS = 256
_TAKEN = struct.Struct("<qq")  # of a loader: the number of its pass, batches that were taken in it
_MOST_CALLERS = 4096


class RankStarted(Struct, frozen=True):
    """A process has joined its default process group, and so is a rank.

    Attributes:
        rank: In that group.
        world_size: Of that group.
        backend: Of that group.
        restart: How often the launcher had restarted the ranks before.
    """

    rank: int
    world_size: int
    backend: str
    restart: int = 0


class WrapperMade(Struct, frozen=True):
    """A `DistributedDataParallel` has been constructed.

    Attributes:
        module: The class of what it wraps.
        ranks: Of its process group.
        context: Of the watch on it.
        location: The line of the script that constructs it.
        by_library: Whether an installed package does, and not the script.
        classes: By path of a submodule ("" for the module itself), its classes of the user, each with file and name.
        modules: For a report: those of the first wrapper of rank 0.
    """

    module: str
    ranks: tuple[int, ...]
    context: WatchContext
    location: Location | None
    by_library: bool
    classes: Mapping[str, tuple[tuple[str, str], ...]]
    modules: tuple[ModuleEntry, ...] = ()


class StepsReported(Struct, frozen=True):
    """What a rank would report when the ranks exchange reports.

    Attributes:
        wrapper: The number of the wrapper.
        report: Of the rank.
        closing: Whether the watch ends with it.
        alone: Whether it shows a fault whatever the other ranks report.
    """

    wrapper: int
    report: RankReport
    closing: bool = False
    alone: bool = False


class ReplicaCaptured(Struct, frozen=True):
    """What a rank would compare with the others after the backward pass of a step.

    Attributes:
        wrapper: The number of the wrapper.
        step: How many had ended before.
        state: Of the replica.
        own: Sketches of the rank's own gradients (see `gather.steps.gradient_sketch`); empty where they were not kept.
        averaged: Sketches of what the wrapper left in `.grad`.
        eps: The machine epsilon of each parameter's dtype, or what a communication hook loses, if that is more.
        hook: The name of the communication hook.
        own_hook: Whether it is none of torch's.
    """

    wrapper: int
    step: int
    state: ReplicaState
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    averaged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    eps: Mapping[str, float] = field(default_factory=dict)
    hook: str = ""
    own_hook: bool = False


class GroupUsed(Struct, frozen=True):
    """A process group has been used for the first time; its name, and the ranks in it."""

    name: str
    members: tuple[int, ...]


class CallersSeen(Struct, frozen=True):
    """Lines of the program have led to a collective for the first time.

    Attributes:
        number: Of them.
        lines: Innermost first.
        files: Of each of the lines.
    """

    number: int
    lines: tuple[str, ...]
    files: tuple[str, ...]


class ExitCalled(Struct, frozen=True):
    """The script has called `sys.exit`; the lines that led to it, innermost first."""

    lines: tuple[str, ...]


class RankRaised(Struct, frozen=True):
    """The script has ended in an exception on this rank; `reply` is as `worlds.failures.described` makes it."""

    reply: Mapping[str, Any]


class WatchingFailed(Struct, frozen=True):
    """An error, of ddpcheck's own or of writing the log, after which this rank is not watched any more."""

    error: str


class GroupDestroyed(Struct, frozen=True):
    """The script has destroyed its default process group."""


class ProgramEnded(Struct, frozen=True):
    """Python has come to the end of the program; no entry after a signal or `os._exit`."""


Entry = (
    RankStarted
    | WrapperBegun
    | WrapperMade
    | StepsReported
    | ReplicaCaptured
    | Inputs
    | LoaderPass
    | DerivedTable
    | StepDraw
    | GatheredConstant
    | OwnPartPutBack
    | OptimizerStep
    | OptimizerEnd
    | StateHeld
    | StateUsed
    | RunningStatistic
    | LossDifferentiated
    | MetricUsed
    | GradientsClipped
    | GradientsZeroed
    | ReducedInPlace
    | FileUsed
    | ModuleChanged
    | GradientsChanged
    | EvaluationPass
    | ResultExchanged
    | MetricShown
    | RowsCompared
    | GatheredTargets
    | GradientsLeft
    | GradientsTaken
    | PaceRun
    | GroupUsed
    | CallersSeen
    | ExitCalled
    | RankRaised
    | WatchingFailed
    | GroupDestroyed
    | ProgramEnded
)


class RankLog:
    """The log that this process writes; a process that is forked from it writes nothing.

    Attributes:
        collectives: How many of all ranks have been made, or are.
        waited: Whether this rank has waited for others since the last of them, in another way.
        batch: The loader, the pass over it and the number of the batch that was taken last; "" before the first.
    """

    def __init__(self, folder: Path, started: RankStarted) -> None:
        name = f"{started.restart}-{started.rank}-{started.world_size}-{os.getpid()}"
        self.path = folder / f"{name}.log"
        self._steps = mapped_file(self.path.with_suffix(".steps"), _LOST + _COUNTS.size)
        self._forwards = mapped_file(self.path.with_suffix(".forwards"), _MOST_WRAPPERS * _FORWARDS.size)
        self._batches = mapped_file(self.path.with_suffix(".batches"), _MOST_LOADERS * _TAKEN.size)
        self._calls = CallRing(self.path.with_suffix(".calls"))
        self._groups: set[str] = set()
        self._callers: dict[tuple[str, ...], int] = {}
        self.batch = ""
        self._process = os.getpid()
        self._world_size = started.world_size
        self.collectives = 0
        self.waited = False
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
        data = pickle.dumps(entry)
        try:
            self._file.append(data)
            if self._stacks is not None:
                self._stacks.hold()
        except OSError as error:
            self._process = -1
            _COUNTS.pack_into(self._steps, _LOST, error.errno or -1, 0)

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

    def count_batch(self, loader: int, number: int, batches: int) -> None:
        """Write that a batch was taken: how many there were, in which pass over which loader."""
        self.batch = f"batch {batches} of pass {number} over loader {loader}"
        if loader < _MOST_LOADERS and os.getpid() == self._process:
            _TAKEN.pack_into(self._batches, loader * _TAKEN.size, number, batches)

    def count(self, wrapper: int, begun: int, ended: int) -> None:
        """Write how many backward passes of a wrapper have begun, and how many steps have ended."""
        if wrapper < _MOST_WRAPPERS:
            _COUNTS.pack_into(self._steps, wrapper * _COUNTS.size, begun, ended)

    def count_forward(self, wrapper: int, line: int, made: int) -> None:
        """Write that a wrapper has made a forward pass at a line, and how many there."""
        if wrapper < _MOST_WRAPPERS and os.getpid() == self._process:
            _FORWARDS.pack_into(self._forwards, wrapper * _FORWARDS.size, line, made)


class WatchedRank(Struct, frozen=True):
    """What one rank has left.

    Attributes:
        started: Who it was.
        entries: All others of its log.
        counts: By wrapper, how many backward passes have begun and how many steps have ended.
        first_call: The number of the first collective of those that are known.
        calls: The last collectives.
        stack: What `faulthandler` has written last; may be empty.
        batches: By loader, the number of its last pass and how many batches were taken in it.
        forwards: By the number of the line of a wrapper's last forward pass, how many it has made there.
    """

    started: RankStarted
    entries: Sequence[Entry]
    counts: Sequence[tuple[int, int]]
    first_call: int = 0
    calls: Sequence[Call] = ()
    stack: str = ""
    batches: Sequence[tuple[int, int]] = ()
    forwards: Mapping[int, int] = field(default_factory=dict)

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
    def has_left(self) -> bool:
        """Whether it needs the other ranks no more: its script has destroyed the process group, or has ended."""
        return any(isinstance(entry, GroupDestroyed | ProgramEnded) for entry in self.entries)


def rank_processes(folder: Path) -> dict[int, int]:
    """The processes of the last start of the ranks, by rank."""
    names = [tuple(map(int, path.stem.split("-"))) for path in folder.glob("*.log")]
    last = max((restart for restart, *_ in names), default=0)
    return {rank: pid for restart, rank, _, pid in names if restart == last}


def read_logs(folder: Path) -> list[WatchedRank]:
    """The logs of the last start of the ranks, by rank."""
    found = [one for path in sorted(folder.glob("*.log")) if (one := _read(path)) is not None]
    last = max((one.started.restart for one in found), default=0)
    return sorted((one for one in found if one.started.restart == last), key=lambda one: one.started.rank)


def comparable_logs(ranks: Sequence[WatchedRank]) -> list[Sequence[Call]]:
    """The last collectives of each rank, from the first that is known of all of them."""
    first = max((rank.first_call for rank in ranks), default=0)
    return [rank.calls[first - rank.first_call :] for rank in ranks]


def _read(path: Path) -> WatchedRank | None:
    entries: list[Entry] = []
    with path.open("rb") as file:
        while True:
            try:
                entries.append(pickle.load(file))
            except Exception:  # of any kind: the rank was killed in the middle of a write
                break
    if not entries or not isinstance(entries[0], RankStarted):
        return None
    steps = path.with_suffix(".steps").read_bytes()
    lost, _ = _COUNTS.unpack_from(steps, _LOST)
    if lost:
        entries.append(WatchingFailed(f"its log was lost: {os.strerror(lost)}"))
    members = {entry.name: entry.members for entry in entries if isinstance(entry, GroupUsed)}
    callers = {str(entry.number): entry.lines for entry in entries if isinstance(entry, CallersSeen)}
    first, calls = read_calls(path.with_suffix(".calls"), members, callers)
    taken = path.with_suffix(".batches")
    batches = list(_TAKEN.iter_unpack(taken.read_bytes())) if taken.exists() else []
    stack = path.with_suffix(".stack")
    text = stack.read_text("utf-8", "replace") if stack.exists() else ""
    counts = list(_COUNTS.iter_unpack(steps[:_LOST]))
    made = path.with_suffix(".forwards")
    forwards = [pair for pair in _FORWARDS.iter_unpack(made.read_bytes()) if pair[1]] if made.exists() else []
    lines = [line for line, _ in forwards]
    alone = {line: number for line, number in forwards if lines.count(line) == 1}
    return WatchedRank(entries[0], entries[1:], counts, first, calls, text, batches, alone)
