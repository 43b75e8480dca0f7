"""What a report draws, beside its findings: modules, a parameter's path, collectives, curves, lines of source.

All of it is bounded by whoever makes it, and may be absent: a renderer shows what there is.
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
    """A line of source code. `path` is relative where it can be, with "/" between its parts."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @classmethod
    def parse(cls, text: str) -> Location | None:
        """The location that prints as `text`; None where it is not one."""
        path, _, line = text.rpartition(":")
        return cls(path, int(line)) if path and line.isdecimal() and len(line) < 10 else None


@dataclass(frozen=True, slots=True)
class RelatedLocation:
    """A line that bears on a finding, beside the line to edit: `role` says what happens there ("optimizer steps")."""

    role: str
    location: Location

    def __str__(self) -> str:
        return f"{self.role} at {self.location}"


MOST_MODULES = 1000
"""Modules that a report describes."""

_AROUND = 3  # lines before and after
_LONGEST_LINE = 200
_MOST_EXCERPTS = 40


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A module of the model.

    Attributes:
        name: Its path from the model; empty for the model itself.
        class_name: Of the module.
        parameters: The names of its own parameters, within it.
        elements: How many numbers its own parameters have.
    """

    name: str
    class_name: str
    parameters: tuple[str, ...] = ()
    elements: int = 0


@dataclass(frozen=True, slots=True)
class PathStep:
    """An operation that reads a parameter, or what was made of it."""

    operation: str
    module: str = ""
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class ParameterPath:
    """The operations from a parameter to the place where its path to the loss ends.

    Attributes:
        parameter: Its name.
        end: `unused`: no operation reads it. `cut`: the last step takes the path out of autograd. `unreachable`: what
            the last step made does not reach the loss. `zero`, `lost`: in the backward of the last step, which is the
            only one that is known, the gradient becomes zero, or is left out.
        steps: In order; where there are many, the first and the last of them.
        left_out: How many are not among them.
        reason: What cut the path ("detach()"), where something did.
        begins_at: The line that is to blame for that, where it is not the line of the last step.
    """

    parameter: str
    end: Literal["unused", "cut", "unreachable", "zero", "lost"]
    steps: tuple[PathStep, ...] = ()
    left_out: int = 0
    reason: str = ""
    begins_at: Location | None = None


@dataclass(frozen=True, slots=True)
class CalledCollective:
    """A collective as ranks have called it: its name in `torch.distributed`, dtype and shape, and "path:line"."""

    operation: str
    payload: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class RankCollectives:
    """The collectives that one rank has called in a process group.

    Attributes:
        rank: The rank.
        first: The number of the first of `calls`, counted from 0.
        calls: Some, around the point where ranks part, or the last ones; as places in the list of the timeline.
        later: How many there were after these.
        waiting: Whether the last one of all had not ended.
        waits_for: The ranks that it waits for: those that have not called what has its number.
        at_end: What the rank did at the end, in words; may be empty.
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
    """The collectives of a process group before and at the end.

    Attributes:
        group: Its name.
        calls: Those that occur, each once.
        ranks: What each of its ranks has called.
        parts_at: The number of the collective at which the ranks part; None where they do not.
    """

    group: str
    calls: tuple[CalledCollective, ...]
    ranks: tuple[RankCollectives, ...]
    parts_at: int | None = None

    def __post_init__(self) -> None:
        """Refuse calls that are not in the list.

        Raises:
            ValueError: There is one.
        """
        if any(not 0 <= call < len(self.calls) for one in self.ranks for call in one.calls):
            raise ValueError(f"a call of process group {self.group!r} is not in the list of its timeline")

    def sides(self) -> list[tuple[tuple[int, ...], CalledCollective, Location]]:
        """Where its ranks part, the ranks that are at each line: what they call there, or have called last."""
        found: dict[CalledCollective, list[int]] = {}
        for log in self.ranks if self.parts_at is not None else ():
            place = min((self.parts_at or 0) - log.first, len(log.calls) - 1)
            if place >= 0:
                found.setdefault(self.calls[log.calls[place]], []).append(log.rank)
        parsed = [(tuple(ranks), call, Location.parse(call.location)) for call, ranks in found.items()]
        return [(ranks, call, place) for ranks, call, place in parsed if place is not None]


LARGEST_VALUE = 1e100
"""No value of a curve is as large."""


@dataclass(frozen=True, slots=True)
class ParityCurve:
    """A number on the ranks and in a single process on the same samples, over time.

    Values are `None` if they are not finite, or too large to be drawn.

    Attributes:
        name: What the number is, in words.
        x_label: What `x` counts.
        x: The places of the points.
        ranks: The number on the ranks at each of these.
        single: The number in a single process at each of these.
        diverges_at: Where the numbers first differ by more than rounding and random numbers; `None` if they do not.
        location: The line that makes or shows the number.
    """

    name: str
    x_label: str
    x: tuple[int, ...]
    ranks: tuple[float | None, ...]
    single: tuple[float | None, ...]
    diverges_at: int | None = None
    location: Location | None = None

    def __post_init__(self) -> None:
        """Refuse values without a place, and values that cannot be drawn.

        Raises:
            ValueError: There is one.
        """
        if not len(self.x) == len(self.ranks) == len(self.single):
            raise ValueError(f"the curves of {self.name!r} do not have a value at each place")
        if not all(value is None or abs(value) < LARGEST_VALUE for value in (*self.ranks, *self.single)):
            raise ValueError(f"a value of the curves of {self.name!r} is not finite, or too large to be drawn")


@dataclass(frozen=True, slots=True)
class SourceExcerpt:
    """Some lines of a file as they were when the report was made."""

    path: str
    first: int
    lines: tuple[str, ...] = added(())


def excerpts_of(places: Iterable[Location | None], folder: Path | None = None) -> tuple[SourceExcerpt, ...]:
    """The lines around these, of files that are there.

    A file outside of the working folder goes by its name alone (`relative_path`): it is looked for in `folder`, that of
    the target, and in those from which Python imports; in the folders beneath, where there is one of the name.
    """
    found: dict[Location, SourceExcerpt] = {}
    for place in dict.fromkeys(places):
        if (
            place is not None
            and len(found) < _MOST_EXCERPTS
            and (excerpt := _excerpt(place, _file_of(place, folder))) is not None
        ):
            found[place] = excerpt
    return tuple(found.values())


_MOST_FILES = 2000  # that are looked through for one of a name


def _file_of(place: Location, folder: Path | None) -> Path:
    """Where the file of a place is, as far as that is known."""
    path = Path(place.path)
    folder = None if folder is None or folder.resolve().is_relative_to(Path.cwd()) else folder
    folders = [*([folder] if folder else []), Path(), *map(Path, sys.path)]
    if (found := next((one / path for one in folders if os.path.isfile(one / path)), None)) is not None:
        return found
    if folder is not None and len(path.parts) == 1:
        beneath = itertools.islice(folder.rglob("*.py"), _MOST_FILES)
        same = [one for one in beneath if one.name == path.name]
        if len(same) == 1:
            return same[0]
    return path


def _excerpt(place: Location, path: Path) -> SourceExcerpt | None:
    try:
        lines = read_source(path).splitlines()
    except (OSError, SyntaxError, ValueError):  # ValueError: no text, or no name of a file
        return None
    if not 0 < place.line <= len(lines):
        return None
    first = max(place.line - _AROUND, 1)
    shown = lines[first - 1 : place.line + _AROUND]
    return SourceExcerpt(place.path, first, tuple(line[:_LONGEST_LINE] for line in shown))
