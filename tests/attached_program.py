"""What `test_attached_report` has a launcher start: several commands in one process, for a launcher costs seconds.

`python attached_program.py FOLDER`: FOLDER/commands is a list of argument lists as JSON, and FOLDER/told0 will be what
comes of them on rank 0.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from ddpcheck.cli import main
from ddpcheck.worlds.launchers.detection import require


def run(arguments: list[str]) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    told = [run(arguments) for arguments in json.loads((folder / "commands").read_text())]
    (folder / f"told{require().rank}").write_text(json.dumps(told))
