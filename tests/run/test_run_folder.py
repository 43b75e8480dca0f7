"""The folder of a run: nobody else has made it, and it goes with the last process that owns it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.record.rank.environment import RunOptions, environment_for
from ddpcheck.run import run_folder
from ddpcheck.run.run_folder import launch_folder, own_folder, user_log_folders
from ddpcheck.stream.rank_log import FOLDER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_all_processes_of_a_launcher_have_one_folder(temporary: Path) -> None:
    folder = launch_folder("0-77-123")
    assert folder == launch_folder("0-77-123") == temporary / f"{FOLDER}0-77-123"
    assert folder.stat().st_mode & 0o777 == 0o700


def prepare(kind: str, path: Path) -> None:
    """Make what an attacker may have prepared at a path."""
    if kind == "link":
        return path.symlink_to(path.parent)
    path.mkdir(mode=0o700)
    if kind == "open folder":
        return path.chmod(0o777)
    if os.geteuid():
        pytest.skip("gives a folder to somebody else")
    return os.chown(path, 65534, 65534)


@pytest.mark.parametrize("kind", ["link", "open folder", "folder of another user"])
def test_a_folder_that_somebody_has_prepared_is_passed_by(temporary: Path, kind: str) -> None:
    prepare(kind, prepared := temporary / f"{FOLDER}0-77-123")
    folder = launch_folder("0-77-123")
    assert folder != prepared and folder == launch_folder("0-77-123")
    assert user_log_folders() == [folder]
    for number in range(1, 9):
        taken = temporary / f"{FOLDER}0-77-123-{number}"
        shutil.rmtree(taken, ignore_errors=True)
        prepare(kind, taken)
    with pytest.raises(UsageError, match=r"another user created .*TMPDIR"):
        launch_folder("0-77-123")


@contextmanager
def left_by(folder: Path, code: str = "", **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that goes on after the agent that had made a folder was killed; it has run `code`."""
    folder.mkdir(mode=0o700)
    program = "import os, sys, pathlib; folder = pathlib.Path(sys.stdin.readline().strip())\n"
    program += f"{code}\nprint(flush=True); sys.stdin.readline()"
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert started.stdin is not None and started.stdout is not None
    try:
        started.stdin.write(f"{folder}\n".encode())
        started.stdin.flush()
        assert started.stdout.readline()
        yield started
    finally:
        started.communicate()


def sweep(temporary: Path) -> None:
    (other := temporary / f"{FOLDER}next").mkdir(mode=0o700, exist_ok=True)
    with own_folder(other):
        pass


HOLDS = f"file = (folder / '0-0-2-1.log').open('w'); (folder / {run_folder._MACHINE!r}).write_text({{machine!r}})"


def test_a_folder_stays_as_long_as_any_process_owns_it(temporary: Path) -> None:
    held, named, gone = (temporary / f"{FOLDER}{name}" for name in ("held", "named", "gone"))
    machine = run_folder.this_machine()
    variables = environment_for(RunOptions(str(named)), {})
    (own := temporary / f"{FOLDER}own").mkdir(mode=0o700)
    with own_folder(own):
        sweep(temporary)
        assert own.exists()
    with left_by(held, HOLDS.format(machine=machine)), left_by(gone, HOLDS.format(machine=machine)) as ends:
        ends.communicate()
        code = HOLDS.format(machine=machine) + "; file.close()"
        with left_by(named, code, **{**variables, "PYTHONPATH": ""}):  # no log yet: it imports torch
            sweep(temporary)
            assert held.exists() and named.exists() and not gone.exists()
    sweep(temporary)
    assert not held.exists() and not named.exists() and not own.exists()


def test_what_cannot_be_judged_stays(temporary: Path) -> None:
    """Another machine's processes cannot be seen; a folder that has just been made does not say whose it is."""
    for name in ("elsewhere", "new", "theirs"):
        (temporary / f"{FOLDER}{name}").mkdir(mode=0o700)
    elsewhere, new, theirs = (temporary / f"{FOLDER}{name}" for name in ("elsewhere", "new", "theirs"))
    (elsewhere / run_folder._MACHINE).write_text("another machine")
    (theirs / run_folder._MACHINE).write_text(run_folder.this_machine())
    if not os.geteuid():
        os.chown(theirs, 65534, 65534)
    else:
        theirs.chmod(0o777)
    sweep(temporary)
    assert elsewhere.exists() and new.exists() and theirs.exists()
