"""What `test_attached` has a launcher start: one rank, which goes through pytest sessions, each in a fork of itself.

`python launched_sessions.py SESSIONS`, where SESSIONS is a JSON list of a folder and arguments of pytest each; all
ranks go on to the next when each has ended the last. torch is imported once for all of them. What both ranks print is
in FOLDER/output, and how the session of rank R ended in FOLDER/codeR.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401

RANK, SIZE = (
    int(os.environ.get(f"OMPI_COMM_WORLD_{name}") or os.environ[other])
    for name, other in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"))
)


def session(folder: Path, arguments: list[str]) -> None:
    """Run pytest as a program of its own would, and end."""
    code = 70
    try:
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        sys.path[0] = str(folder)  # as of `python -m pytest`
        sys.argv[:] = ["pytest", *arguments]
        code = int(pytest.main(arguments))
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for name, *arguments in json.loads(sys.argv[1]):
        folder = Path(name)
        pid = os.fork()
        if not pid:
            session(folder, arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / f"draft{RANK}").write_text(str(code))
        (folder / f"draft{RANK}").rename(folder / f"code{RANK}")
        deadline = time.monotonic() + 60
        while not all((folder / f"code{rank}").exists() for rank in range(SIZE)):
            assert time.monotonic() < deadline, f"a rank has not ended its session in {folder}"
            time.sleep(0.01)


if __name__ == "__main__":
    main()
