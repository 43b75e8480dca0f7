"""Read untrusted files within limits, and check who owns a folder."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import stat
import tokenize
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import TypeVar

Data = TypeVar("Data", bytes, str)

MOST_BYTES = 1 << 28
"""Largest size in bytes of one input: a report, a record, a dump, the page of a server, the log of a rank."""

MOST_RANKS = 1 << 17
"""Largest number of ranks of a job whose dumps, records and logs are read."""

_MOST_SOURCE = 1 << 24
_MOST_MEMORY = 1 << 33


def read_file(path: str | Path, most: int = MOST_BYTES, *, own: bool = False, head: bool = False) -> bytes:
    """Read a regular file of at most `most` bytes, or raise `OSError`.

    `own` requires a file of this user that is not a symbolic link; `head` returns the first bytes of a larger file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (own and status.st_uid != os.geteuid()):
            kind = "a file of this user" if own else "a regular file"
            raise OSError(errno.EINVAL, f"it is not {kind}", str(path))
        return file.read(most) if head else check_size(file.read(min(status.st_size, most) + 1), most, str(path))


def check_size(data: Data, most: int = MOST_BYTES, name: str = "") -> Data:
    """Return `data`, or raise `OSError` if longer than `most` bytes or characters."""
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB, and ddpcheck reads no more of one input", name)
    return data


def decompress(data: bytes) -> bytes:
    """Decompress gzip data (or raise `OSError`); return other data unchanged."""
    if not data.startswith(b"\x1f\x8b"):  # magic number of gzip
        return data
    try:
        return check_size(GzipFile(fileobj=io.BytesIO(data)).read(MOST_BYTES + 1))
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Limit memory in a `with` block, so that malformed input cannot exhaust the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # no /proc, or the limit is already lower
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        max_bytes = min([used_bytes + _MOST_MEMORY, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def read_source(path: str | Path) -> str:
    """Read a Python source file; raise `OSError`, `SyntaxError` or `ValueError` on failure."""
    data = read_file(path, _MOST_SOURCE)
    return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])


def process_stat(task: int | str) -> list[str]:
    """Return the fields of proc_pid_stat(5) from `state` on; [] if the task has ended."""
    try:
        return Path(f"/proc/{task}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def belongs_to_user(path: Path) -> bool:
    """Check if `path` is a folder of this user, not writable by others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
