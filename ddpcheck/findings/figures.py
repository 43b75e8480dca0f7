"""Data for figures of a report: modules, parameter paths, collectives, curves and source lines.

All figures are optional, and their size is limited where the data is created.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpcheck.findings.files import read_source
from ddpcheck.findings.from_json import added


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Line of source code. `path` is relative if possible, with "/" as separator."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @classmethod
    def parse(cls, text: str) -> Location | None:
        """Parse "path:line"; return None if invalid."""
        path, _, line = text.rpartition(":")
        return cls(path, int(line)) if path and line.isdecimal() and len(line) < 10 else None


@dataclass(frozen=True, slots=True)
class RelatedLocation:
    """Additional line of a finding; `role` describes the line ("optimizer steps")."""

    role: str
    location: Location

    def __str__(self) -> str:
        return f"{self.role} at {self.location}"


MOST_MODULES = 1000
"""Largest number of modules in a report."""

_CONTEXT_LINES = 3  # lines of context on each side
_LONGEST_LINE = 200
_MOST_EXCERPTS = 40


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """Module of the model.

    Attributes:
        name: Qualified name; empty for the model itself.
        class_name: Class of the module.
        parameters: Names of parameters registered directly on the module.
        elements: Number of elements of the parameters registered directly on the module.
    """

    name: str
    class_name: str
    parameters: tuple[str, ...] = ()
    elements: int = 0


@dataclass(frozen=True, slots=True)
class PathStep:
    """Operation on a parameter, or on a tensor computed from the parameter."""

    operation: str
    module: str = ""
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class ParameterPath:
    """Operations from a parameter to the end of its path to the loss.

    Attributes:
        parameter: Name of the parameter.
        end: `unused`: no operation reads the parameter. `cut`: the last step takes the path out of autograd.
            `unreachable`: the output of the last step does not reach the loss. `zero`, `lost`: in the backward of the
            last step (the only known step), the gradient becomes zero, or is dropped.
        steps: Operations in order; only the first and last of a long path.
        left_out: Number of operations missing in `steps`.
        reason: Operation that cut the path ("detach()"); may be empty.
        begins_at: Line that caused the cut, if different from the line of the last step.
    """

    parameter: str
    end: Literal["unused", "cut", "unreachable", "zero", "lost"]
    steps: tuple[PathStep, ...] = ()
    left_out: int = 0
    reason: str = ""
    begins_at: Location | None = None


@dataclass(frozen=True, slots=True)
class CalledCollective:
    """Collective call: name in `torch.distributed`, dtype and shape, and "path:line"."""

    operation: str
    payload: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """Collectives called by one rank in a process group.

    Attributes:
        rank: The rank.
        first: Sequence number of the first of `calls`, from 0.
        calls: Calls around the point where ranks diverge, or the last calls; indices into `calls` of the timeline.
        later: Number of calls after `calls`.
        waiting: True if the very last call had not ended.
        waits_for: Ranks that the last call waits for, since they made no call with the same sequence number.
        at_end: State of the rank at the end, in words; may be empty.
    """

    rank: int
    first: int = 0
    calls: tuple[int, ...] = ()
    later: int = 0
    waiting: bool = False
    waits_for: tuple[int, ...] = ()
    at_end: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveTimeline:
    """Last collectives of a process group, by rank.

    Attributes:
        group: Name of the process group.
        calls: Distinct calls of all ranks.
        ranks: Calls of each rank of the group.
        parts_at: Sequence number of the first collective that differs across ranks, or None.
    """

    group: str
    calls: tuple[CalledCollective, ...]
    ranks: tuple[RankCollectives, ...]
    parts_at: int | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for an index into `calls` that is out of range."""
        if any(not 0 <= call < len(self.calls) for log in self.ranks for call in log.calls):
            raise ValueError(f"a call of process group {self.group!r} is not in the list of its timeline")

    def sides(self) -> list[tuple[tuple[int, ...], CalledCollective, Location]]:
        """Return (ranks, call, line) of each distinct call where the ranks diverge."""
        ranks_by_call: dict[CalledCollective, list[int]] = {}
        for log in self.ranks if self.parts_at is not None else ():
            index = min((self.parts_at or 0) - log.first, len(log.calls) - 1)
            if index >= 0:
                ranks_by_call.setdefault(self.calls[log.calls[index]], []).append(log.rank)
        parsed = [(tuple(ranks), call, Location.parse(call.location)) for call, ranks in ranks_by_call.items()]
        return [(ranks, call, location) for ranks, call, location in parsed if location is not None]


LARGEST_VALUE = 1e100
"""Exclusive upper bound of the values of a curve."""


@dataclass(frozen=True, slots=True)
class ParityCurve:
    """Metric over time, on the ranks and in a single process on equal samples.

    Values are `None` if not finite, or too large to draw.

    Attributes:
        name: Name of the metric, in words.
        x_label: Quantity counted by `x`.
        x: Positions of the points.
        ranks: Metric on the ranks at each position.
        single: Metric in a single process at each position.
        diverges_at: First position with a difference beyond rounding and random numbers, or `None`.
        location: Line that computes or shows the metric.
    """

    name: str
    x_label: str
    x: tuple[int, ...]
    ranks: tuple[float | None, ...]
    single: tuple[float | None, ...]
    diverges_at: int | None = None
    location: Location | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` if lengths differ, or a value cannot be drawn."""
        if not len(self.x) == len(self.ranks) == len(self.single):
            raise ValueError(f"the curves of {self.name!r} do not have a value at each place")
        if not all(value is None or abs(value) < LARGEST_VALUE for value in (*self.ranks, *self.single)):
            raise ValueError(f"a value of the curves of {self.name!r} is not finite, or too large to be drawn")


@dataclass(frozen=True, slots=True)
class SourceExcerpt:
    """Lines of a source file, as of the time of the report."""

    path: str
    first: int
    lines: tuple[str, ...] = added(())


def excerpts_of(places: Iterable[Location | None], folder: Path | None = None) -> tuple[SourceExcerpt, ...]:
    """Return the source lines around each location whose file is found.

    The path of a location may be only a file name (`relative_path`). The file is searched for in the target's `folder`,
    the working folder and `sys.path`, then in subfolders of `folder`, where exactly one file must have the name.
    """
    locations = (location for location in dict.fromkeys(places) if location is not None)
    excerpts = (_excerpt(location, _source_file(location, folder)) for location in locations)
    return tuple(itertools.islice(filter(None, excerpts), _MOST_EXCERPTS))


_MOST_FILES = 2000  # searched for a file name


def _source_file(location: Location, folder: Path | None) -> Path:
    """Return the file of a location, or the location's own path if not found."""
    path = Path(location.path)
    folder = None if folder is None or folder.resolve().is_relative_to(Path.cwd()) else folder
    folders = [*([folder] if folder else []), Path(), *map(Path, sys.path)]
    if (file := next((parent / path for parent in folders if os.path.isfile(parent / path)), None)) is not None:
        return file
    if folder is not None and len(path.parts) == 1:
        files = itertools.islice(folder.rglob("*.py"), _MOST_FILES)
        matches = [match for match in files if match.name == path.name]
        if len(matches) == 1:
            return matches[0]
    return path


def _excerpt(location: Location, path: Path) -> SourceExcerpt | None:
    try:
        lines = read_source(path).splitlines()
    except (OSError, SyntaxError, ValueError):  # ValueError: not text, or an invalid file name
        return None
    if not 0 < location.line <= len(lines):
        return None
    first = max(location.line - _CONTEXT_LINES, 1)
    context = lines[first - 1 : location.line + _CONTEXT_LINES]
    return SourceExcerpt(location.path, first, tuple(line[:_LONGEST_LINE] for line in context))
