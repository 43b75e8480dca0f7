"""`ddpcheck live`: what the ranks of a run do now, and what has been found of them so far.

The ranks are looked at twice. The run is not stopped, and nothing of it is changed: each rank writes its stack into a
file of the run's folder, as it does when the run is watched for hangs.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.stacks import own_stack, program_lines
from ddpcheck.findings.wording import counted
from ddpcheck.judge.endings.rank_failure import describe_failure
from ddpcheck.run.ending import Ending, call_of_ddp
from ddpcheck.run.hang_watch import Hang
from ddpcheck.run.living_ranks import LivingRanks, used
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.watched_rank import FOLDER, SCRIPT, WatchedRank, read_logs
from ddpcheck.worlds import failures

_BETWEEN = 3.0  # seconds between the two looks


def report_on_run(
    folder: Path,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    suppress: Sequence[Suppression] = (),
) -> Report:
    """The report on a run that goes on; takes four seconds.

    Args:
        folder: Of the run.
        select: Codes, prefixes or names of the rules to report; all where there are none.
        ignore: Those that are not reported.
        suppress: Findings that are shown with a reason, and do not count.

    Raises:
        UsageError: No rank of a run that lives has left a log there.
    """
    look = LivingRanks(folder)
    before, since, progress = used(look.living()[0]), time.monotonic(), look.progress()
    time.sleep(_BETWEEN)
    ranks, are_all_here = look.living()
    if not ranks:
        raise UsageError(f"no rank that lives has left a log in {folder}: is it the folder of a `ddpcheck run`?")
    seconds = time.monotonic() - since
    facts, stacks = look.facts(ranks, before, seconds), look.stacks(ranks)
    got_on = {int(name.split("-")[1]) for name, state in look.progress().items() if progress.get(name) != state}
    logs = read_logs(folder)
    waiting = {rank: stacks.get(rank, "") for rank in ranks if facts[rank].waits(own_stack(stacks.get(rank, "")))}
    hangs = are_all_here and not got_on and len(waiting) == len(ranks)
    doing = {log.started.rank: _doing(log, stacks, got_on, waiting) for log in logs if log.started.rank in ranks}
    return report_on_script(
        (folder / SCRIPT).read_text(),
        Ending(hang=Hang(seconds, waiting) if hangs else None, doing=doing),
        logs,
        select=select,
        ignore=ignore,
        suppress=suppress,
    )


def _doing(log: WatchedRank, stacks: dict[int, str], got_on: set[int], waiting: dict[int, str]) -> str:
    """What a rank does, in words that come after its name."""
    rank = log.started.rank
    lines = program_lines(stacks.get(rank, ""))
    at = f" at {lines[0]}" if lines else " in code of a library"
    steps = f", after {counted(max(ended for _, ended in log.counts), 'step')}" if log.counts else ""
    if rank in got_on:
        return f"was{at}, and got on{steps}"
    if rank in waiting:
        stuck = failures.stuck(rank, 0.0, waiting[rank], "", call_of_ddp(log, waiting[rank]))
        return f"{describe_failure(stuck)}{steps}"
    return f"is{at}{steps}"


def the_run(given: str | None) -> Path:
    """The folder of the run that is meant: the one that is named, else the only one of this user that goes on.

    Raises:
        UsageError: There is none, or there are several; or the system is not Linux.
    """
    if sys.platform != "linux":
        raise UsageError("ddpcheck live looks at processes by /proc, which only Linux has")
    if given is not None:
        if not (Path(given) / SCRIPT).is_file():
            raise UsageError(f"{given} is no folder of a run that goes on")
        return Path(given)
    found = list(_runs())
    if len(found) == 1:
        return found[0]
    where = f"{tempfile.gettempdir()}/{FOLDER}*"
    if not found:
        raise UsageError(f"no run of {getpass.getuser()} goes on, on this machine: looked for {where}")
    each = "; ".join(f"{path} ({(path / SCRIPT).read_text()})" for path in found)
    raise UsageError(f"{counted(len(found), 'run')} go on; name the folder of one: {each}")


def _runs() -> Iterator[Path]:
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER}*")):
        if path.stat().st_uid == os.getuid() and (path / SCRIPT).exists() and LivingRanks(path).living()[0]:
            yield path
