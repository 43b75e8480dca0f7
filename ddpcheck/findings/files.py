"""Files and folders that somebody else may have a hand in: read within limits, and made where nobody else can write."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import stat
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Data = TypeVar("Data", bytes, str)

MOST_BYTES = 1 << 28
"""Bytes of one input: a report, a record, a dump, the page of a server, the log of a rank."""

MOST_RANKS = 1 << 17
"""Ranks of a job whose dumps, records and logs are read."""

_MOST_SOURCE = 1 << 24
_MOST_MEMORY = 1 << 33


def read_file(path: str | Path, most: int = MOST_BYTES, *, own: bool = False, head: bool = False) -> bytes:
    """The bytes of a regular file of at most so many, or an `OSError`.

    Args:
        path: The file.
        most: The limit.
        own: The file belongs to this user, and is no link.
        head: Read the first bytes of a larger file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (own and status.st_uid != os.geteuid()):
            raise OSError(
                errno.EINVAL, "it is not a regular file" if not own else "it is not a file of this user", str(path)
            )
        return file.read(most) if head else within(file.read(min(status.st_size, most) + 1), most, str(path))


def within(data: Data, most: int = MOST_BYTES, name: str = "") -> Data:
    """The data again, or an `OSError` if there is more than `most` of it."""
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB, and ddpcheck reads no more of one input", name)
    return data


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Refuse more memory than a reader needs in the block, by `MemoryError`: a few bytes can ask for 60 GB of it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # no /proc; or the limit is lower already
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = min([used + _MOST_MEMORY, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def read_source(path: str | Path) -> str:
    """The text of a file of Python, or an `OSError`, `SyntaxError` or `ValueError`; the path may be foreign."""
    data = read_file(path, _MOST_SOURCE)
    return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])


def process_stat(task: int | str) -> list[str]:
    """The fields of a process or thread from its state on, as in proc_pid_stat(5); none if it has ended."""
    try:
        return Path(f"/proc/{task}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_own_folder(path: Path) -> bool:
    """Detect a folder, and no link, that belongs to this user and in which nobody else can write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
