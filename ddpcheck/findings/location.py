"""A line of source code."""

from __future__ import annotations

from dataclasses import dataclass


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
        return cls(path, int(line)) if path and line.isdigit() else None
