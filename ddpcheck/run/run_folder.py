"""Private log folders of runs; later runs remove folders without an owner.

An owner is any process started by the script, or the process that reports. If torchrun's agent is killed, its ranks
continue, as under torchrun itself, and own the folder until the last rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.files import belongs_to_user, read_file
from ddpcheck.stream.rank_log import FOLDER
from ddpcheck.worlds.launchers.rendezvous import this_machine

_MACHINE = "machine"  # file with the name of the machine: only local processes can be seen
_MOST_TAKEN = 9  # maximum number of names to try, if other users own the folders


def launch_folder(name: str) -> Path:
    """Create or reuse a launch's log folder; `UsageError` if another user owns the folder."""
    for number in range(_MOST_TAKEN):
        folder = Path(tempfile.gettempdir(), f"{FOLDER}{name}{f'-{number}' if number else ''}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if belongs_to_user(folder):
            return folder
    raise UsageError(f"another user created {folder}; set TMPDIR to a folder in which no other user can write")


def user_log_folders() -> list[Path]:
    """Return the log folders owned by this user."""
    return [path for path in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER}*")) if belongs_to_user(path)]


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Remove log folders that no process owns; own `folder` while the block runs."""
    for old_folder in user_log_folders():
        with contextlib.suppress(OSError):
            processes = list(Path("/proc").glob("[0-9]*"))  # empty if not on Linux
            is_local = bool(processes) and read_file(old_folder / _MACHINE, own=True).decode() == this_machine()
            if is_local and old_folder != folder and not any(_is_owner(process, old_folder) for process in processes):
                shutil.rmtree(old_folder)
    with (folder / _MACHINE).open("w") as file:  # an open file marks the owner, which a PID cannot: PIDs are reused
        file.write(this_machine())
        file.flush()
        yield


def _is_owner(process: Path, folder: Path) -> bool:
    try:
        is_named = folder.name.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        files = (os.readlink(file) for file in (process / "fd").iterdir())
        is_user = process.stat().st_uid == os.geteuid()
        return is_user and (is_named or any(file.startswith(f"{folder.resolve()}/") for file in files))
    except OSError:  # the process has just ended
        return False
