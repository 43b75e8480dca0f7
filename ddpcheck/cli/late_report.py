"""Wait for ranks of `ddpcheck.monitor` in the background, end hung ones, and report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from ddpcheck.cli.output import complain, complain_of
from ddpcheck.cli.run import report_output, show_report
from ddpcheck.cli.saved import load_report
from ddpcheck.findings.errors import EXIT_HANG, DDPCheckError
from ddpcheck.report.settings import Settings
from ddpcheck.run.check_options import settings_from_args
from ddpcheck.run.ending import Ending
from ddpcheck.run.flight_dumps import create_dump_folder
from ddpcheck.run.hang_watch import HangWatch
from ddpcheck.run.live_ranks import is_alive
from ddpcheck.run.run_folder import own_folder
from ddpcheck.stream.entries import RankRaised
from ddpcheck.stream.rank_log import read_logs
from ddpcheck.trace.script_facts import entries_of

_POLL = 0.1  # seconds between two polls
_QUIET = 2.0  # seconds without live ranks to wait, since a live launcher may restart ranks


def main() -> None:
    """Report on ranks of `ddpcheck.monitor` once all have ended; remove their log folder."""
    folder, launcher, args = Path(sys.argv[1]), int(sys.argv[2]), argparse.Namespace(**json.loads(sys.argv[3]))
    if args.check_flight_recorder is not None:
        create_dump_folder(Path(args.check_flight_recorder))
    settings, baseline = Settings(), None
    try:
        settings = settings_from_args(args)
        baseline = None if args.check_baseline is None else load_report(args.check_baseline)
    except DDPCheckError as error:  # the script is already running, so report anyway
        complain(f"{error}; the report has no suppressions and no baseline")
    watch = HangWatch(folder, args.check_timeout, lambda: _end_ranks(folder))
    try:
        with own_folder(folder):
            _wait_for_ranks(folder, launcher)
        watch.stop()
        with report_output(args) as output:
            script = shlex.join([args.script, *args.arguments])
            show_report(script, _infer_ending(folder, watch), folder, args, output, settings, baseline)
    except Exception as error:
        if args.debug:
            raise
        complain_of(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_ranks(folder: Path, launcher: int) -> None:
    """Wait until ranks and launcher ended, or no rank ran for `_QUIET` seconds."""
    last_alive = time.monotonic()
    while time.monotonic() - last_alive < _QUIET:
        if _live_pids(folder):
            last_alive = time.monotonic()
        elif not is_alive(launcher):
            return
        time.sleep(_POLL)


def _live_pids(folder: Path) -> list[int]:
    return [pid for path in folder.glob("*.pid") if is_alive(pid := int(path.stem))]


def _end_ranks(folder: Path) -> None:
    for pid in _live_pids(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def _infer_ending(folder: Path, watch: HangWatch) -> Ending:
    """Infer from the logs how ranks ended, since only the launcher knows exit codes."""
    if watch.not_exited is not None:
        return Ending(not_exited=watch.not_exited)
    if watch.hang is not None:
        return Ending(EXIT_HANG, hang=watch.hang)
    ranks = read_logs(folder)
    if any(entries_of(rank, RankRaised) for rank in ranks):
        return Ending(1)
    return Ending(0 if all(rank.has_ended for rank in ranks) else -1)


if __name__ == "__main__":
    main()
