"""The logs in a folder, in parts: what another machine sends is checked before it becomes a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

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
