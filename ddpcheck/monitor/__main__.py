"""`python -m ddpcheck.monitor train.py`: watch a script under any launcher.

Each process of the launcher (torchrun, mpirun, srun, accelerate) becomes the script's process by `exec`: pid, signals
and exit code are the script's. The first process starts a detached reporter for the end of the run.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys

from ddpcheck.findings.errors import EXIT_USAGE, ConfigError, UsageError
from ddpcheck.findings.files import process_stat
from ddpcheck.record.rank.environment import RunOptions, environment_for
from ddpcheck.run.check_options import add_check_options, settings_from_args, split_at_script
from ddpcheck.run.run_folder import launch_folder
from ddpcheck.stream.rank_log import SCRIPT

_REPORTER = "ddpcheck.cli.late_report"


def main() -> int:
    """Start one reporter process per machine, then replace this process by the script."""
    parser = argparse.ArgumentParser(
        prog="python -m ddpcheck.monitor",
        usage="%(prog)s [options] script [arguments of the script]",
        description="Run a script and watch it, under any launcher: torchrun --nproc-per-node 2 -m ddpcheck.monitor "
        "train.py. The report is written to standard error when all ranks on this machine have ended.",
    )
    add_check_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    parser.add_argument("script")
    options, script = split_at_script(parser, sys.argv[1:])
    args = parser.parse_args([*options, *script[:1]])
    args.arguments = script[1:]
    if args.check_parity:
        parser.error("--check-parity starts the script again, which ddpcheck run does and this command does not")
    settings_from_args(args)
    started = (process_stat(os.getppid())[19:] or "0")[0]  # start time, since the pid may be reused
    folder = launch_folder(f"{os.getuid()}-{os.getppid()}-{started}")
    (folder / f"{os.getpid()}.pid").touch()
    script = [*(["-m"] if args.module else []), *script]
    try:
        (folder / "reporter").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        (folder / SCRIPT).write_text(shlex.join(script))
        _start_detached([sys.executable, "-m", _REPORTER, str(folder), str(os.getppid()), json.dumps(vars(args))])
    flags = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    environment = environment_for(RunOptions(str(folder), args.check_every), os.environ)
    os.execve(sys.executable, [sys.executable, *flags, *script], environment)


def _start_detached(command: list[str]) -> None:
    child = os.fork()
    if not child:
        try:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, UsageError) as error:
        print(f"ddpcheck: error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
