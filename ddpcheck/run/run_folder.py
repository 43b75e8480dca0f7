"""The folders in which the ranks of runs leave their logs: nobody else enters them, and none stays without an owner.

An owner is any process that the script has started, or that reports on it. Where torchrun's agent is killed, its ranks
go on, as under torchrun itself, and own the folder until the last of them has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.files import is_own_folder, read_file
from ddpcheck.stream.rank_log import FOLDER
from ddpcheck.worlds.launchers.rendezvous import this_machine

_MACHINE = "machine"  # the file in a folder that names the machine, whose processes alone can be seen
_MOST_TAKEN = 9  # names that somebody else may have taken


def shared_folder(name: str) -> Path:
    """The folder of that name, for all processes that a launcher has started: each computes the same name.

    Raises:
        UsageError: Somebody else has taken it.
    """
    for number in range(_MOST_TAKEN):
        folder = Path(tempfile.gettempdir(), f"{FOLDER}{name}{f'-{number}' if number else ''}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if is_own_folder(folder):
            return folder
    raise UsageError(f"another user created {folder}; set TMPDIR to a folder in which no other user can write")


def own_folders() -> list[Path]:
    """Those of this user, for which others have no way to stand in."""
    return [path for path in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER}*")) if is_own_folder(path)]


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Own a folder while the block runs; those that no process owns any more are removed before."""
    for other in own_folders():
        with contextlib.suppress(OSError):
            processes = list(Path("/proc").glob("[0-9]*"))  # none on another system than Linux
            is_here = bool(processes) and read_file(other / _MACHINE, own=True).decode() == this_machine()
            if is_here and other != folder and not any(_owns(process, other) for process in processes):
                shutil.rmtree(other)
    with (folder / _MACHINE).open("w") as file:  # open files tell who owns it; a process of the same number has none
        file.write(this_machine())
        file.flush()
        yield


def _owns(process: Path, folder: Path) -> bool:
    """Detect a process of this user that has inherited the name of a folder, or has a file in it open."""
    try:
        named = folder.name.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        files = (os.readlink(file) for file in (process / "fd").iterdir())
        is_user = process.stat().st_uid == os.geteuid()
        return is_user and (named or any(file.startswith(f"{folder.resolve()}/") for file in files))
    except OSError:  # it has just ended
        return False
