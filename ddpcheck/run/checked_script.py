"""`check_script(path)`: run a script under `ddpcheck run` in separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddpcheck.findings.errors import HangError, TargetError
from ddpcheck.findings.report import Report
from ddpcheck.findings.wording import suggests_names

_LAUNCHER_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_GRACE = 10.0  # seconds for `ddpcheck run` to end its ranks


@suggests_names("check_script")
def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_size: int = 2,
    parity: bool = True,
    timeout: float = 600.0,
) -> Report:
    """Run a script on local ranks, like `ddpcheck run`, and return the report.

    Args:
        script: Path of the script.
        arguments: Command-line arguments of the script.
        world_size: The number of ranks.
        parity: Also run the script in a single process on the same samples, and compare (`--check-parity`).
        timeout: Seconds for all runs together.

    Returns:
        The report, with findings or without.

    Raises:
        HangError: All runs together took longer than `timeout`.
        TargetError: There is no report, e.g. because the script does not exist; has the last line of the output.
    """
    command = [sys.executable, "-m", "ddpcheck", "run", "--standalone", f"--nproc-per-node={world_size}"]
    command += ["--check-parity"] * parity
    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_ENV}
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "report.json"), Path(folder, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, f"--check-output={output}", os.fspath(script), *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
            except BaseException as error:
                _end_process(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
        log_text = log.read_text(errors="replace").strip()
        if process.returncode < 0:
            raise HangError(f"{script} has not come to its end in {timeout:.0f} s.", detail=log_text)
        if not output.exists():
            raise TargetError(f"There is no report on {script}: {log_text.rpartition(chr(10))[2]}", detail=log_text)
        return Report.from_json(output.read_text("utf-8"))


def _end_process(process: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    process.returncode = -signal.SIGKILL
