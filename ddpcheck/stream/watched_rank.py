"""What ranks have left, read from the folder of their run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ddpcheck.findings.evidence.construction import WrapperBegun
from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.stream.codec import decoded
from ddpcheck.stream.collective_ring import read_calls, read_wait
from ddpcheck.stream.counters import read_counters
from ddpcheck.stream.entries import (
    CallersSeen,
    Entry,
    GroupDestroyed,
    GroupUsed,
    ProgramEnded,
    RankStarted,
    WatchingFailed,
    WrapperMade,
)

FOLDER = "ddpcheck-run-"
"""How the name of a run's folder begins, in the directory for temporary files."""

SCRIPT = "script"
"""The file in it that holds the command line of the script."""


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
        unknown: How many entries this version cannot read.
        waits_for: What it waits for in a point-to-point call, if that is what it does.
    """

    started: RankStarted
    entries: Sequence[Entry]
    counts: Sequence[tuple[int, int]]
    first_call: int = 0
    calls: Sequence[Call] = ()
    stack: str = ""
    batches: Sequence[tuple[int, int]] = ()
    forwards: Mapping[int, int] = field(default_factory=dict)
    unknown: int = 0
    waits_for: PeerWait | None = None

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
    """The logs of the last start of the ranks, by rank; those of other nodes are in folders of their own."""
    nodes = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    ranks = {one.started.rank: one for node in reversed(nodes) for one in _read_node(node)}
    return [ranks[rank] for rank in sorted(ranks)]


def _read_node(folder: Path) -> list[WatchedRank]:
    found = [one for path in sorted(folder.glob("*.log")) if (one := _read(path)) is not None]
    last = max((one.started.restart for one in found), default=0)  # nodes may count apart
    return [one for one in found if one.started.restart == last]


def comparable_logs(ranks: Sequence[WatchedRank]) -> list[Sequence[Call]]:
    """The last collectives of each rank, from the first that is known of all of them."""
    first = max((rank.first_call for rank in ranks), default=0)
    return [rank.calls[first - rank.first_call :] for rank in ranks]


def _read(path: Path) -> WatchedRank | None:
    entries, unknown = decoded(path.read_bytes())
    if not entries or not isinstance(entries[0], RankStarted):
        return None
    counts, lost = read_counters(path.with_suffix(".steps"))
    batches, _ = read_counters(path.with_suffix(".batches"))
    forwards, _ = read_counters(path.with_suffix(".forwards"))
    if lost:
        entries.append(WatchingFailed(f"its log was lost: {os.strerror(lost)}"))
    members = {entry.name: entry.members for entry in entries if isinstance(entry, GroupUsed)}
    callers = {str(entry.number): entry.lines for entry in entries if isinstance(entry, CallersSeen)}
    first, calls = read_calls(path.with_suffix(".calls"), members, callers)
    stack = path.with_suffix(".stack")
    text = stack.read_text("utf-8", "replace") if stack.exists() else ""
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
