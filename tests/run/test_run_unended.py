"""Ranks that do not end: those that have run all of the script, and those that do not heed the signal to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpcheck.findings.evidence import Entry
from ddpcheck.run import hang_watch, live_ranks
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import Hang, HangWatch, NotExited
from ddpcheck.run.live_ranks import RankFacts, gloo_wants_gil, is_alive, is_stopped
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import GroupDestroyed, ProgramEnded, RankRaised, RankStarted
from ddpcheck.stream.rank_log import RankLog, read_logs
from ddpcheck.worlds.failures import exception_data
from tests.run.scripts import run_script
from tests.run.test_run import DDPCHECK, ROOT, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

NOWHERE = "Current thread 0x1 (most recent call first):\n  <no Python frame>\n"
AT_EXIT = 'Current thread 0x1 (most recent call first):\n  File "/x/wandb/finish.py", line 7 in upload\n'
LAST_LINE = 'Thread 0x2:\n  <no Python frame>\n\nCurrent thread 0x1:\n  File "/home/me/train.py", line 41 in <module>\n'
WAITS = """Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 41 in main
"""


def watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *ranks: tuple[Entry | None, str, bool], world_size: int = 0
) -> HangWatch:
    """A watch that has looked at idle ranks: of each the last entry, its stack, and whether gloo wants the GIL."""
    for number, (entry, _, _) in enumerate(ranks):
        log = RankLog(folder, RankStarted(number, world_size or len(ranks), "gloo"))
        if entry is not None:
            log.add(entry)
    watch = HangWatch(folder, 60.0, lambda: None)
    watch.stop()
    stacks: Mapping[int, str] = {number: stack for number, (_, stack, _) in enumerate(ranks)}
    monkeypatch.setattr(watch._ranks, "stacks", lambda _: stacks)
    monkeypatch.setattr(live_ranks, "gloo_wants_gil", lambda pid: ranks[pid][2])
    facts = {number: RankFacts(is_idle=True) for number in range(len(ranks))}
    watch._are_hung({number: number for number in facts}, facts, 60.0, not world_size)
    return watch


@pytest.mark.parametrize(
    ("entry", "stack", "wants_gil", "is_unended"),
    [
        (ProgramEnded(), NOWHERE, False, True),  # in the destructor of something, after Python
        (ProgramEnded(), AT_EXIT, True, True),
        (GroupDestroyed(), LAST_LINE, True, True),
        (ProgramEnded(), AT_EXIT, False, False),  # a function of atexit that waits for a server
        (GroupDestroyed(), LAST_LINE, False, False),  # goes on without the others
        (None, LAST_LINE, True, False),
        (None, NOWHERE, False, False),
        (ProgramEnded(), "", False, False),
    ],
)
def test_a_rank_that_has_run_all_of_the_script_and_cannot_end_is_seen(
    entry: Entry | None, stack: str, wants_gil: bool, is_unended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(tmp_path, monkeypatch, (entry, stack, wants_gil))
    assert watch.not_exited == (NotExited(60.0, (0,)) if is_unended else None)
    assert watch.hang is None


def test_ranks_that_wait_for_one_that_cannot_end_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(tmp_path, monkeypatch, (GroupDestroyed(), LAST_LINE, True), (None, WAITS, False))
    assert watch.not_exited is None and watch.hang is not None
    assert watch.hang.stacks == {1: WAITS}


def test_a_rank_that_cannot_end_is_seen_without_those_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits").mkdir()
    watch = watched(tmp_path, monkeypatch, (ProgramEnded(), NOWHERE, False), world_size=2)
    assert watch.not_exited == NotExited(60.0, (0,))
    watch = watched(tmp_path / "waits", monkeypatch, (None, WAITS, False), world_size=2)
    assert (watch.not_exited, watch.hang) == (None, None)


def test_the_report_on_ranks_that_did_not_end_is_that_on_the_run(tmp_path: Path) -> None:
    for number in (0, 1):
        RankLog(tmp_path, RankStarted(number, 2, "gloo")).add(GroupDestroyed())
    ranks = read_logs(tmp_path)
    report = report_on_script("train.py", Ending(not_exited=NotExited(61.2, (0, 1))), ranks)
    plain = report_on_script("train.py", Ending(), ranks)
    assert (report.findings, report.checks, report.exit_code()) == (plain.findings, plain.checks, 0)
    (note,) = report.world["notes"]
    assert note.startswith(
        "ranks 0 and 1 have run all of the script, but did not exit for 61 s, so ddpcheck ended them"
    )


def test_a_process_without_gloo_does_not_want_the_gil() -> None:
    assert not gloo_wants_gil(os.getpid())


@pytest.mark.parametrize("works", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_heed_the_signal_is_killed_unless_it_works(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "_GRACE", 0.3)
    ignores = "import signal, time; signal.signal(15, lambda *_: None); print(flush=True)"
    code = f"{ignores}\nwhile True: {works} or time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch = HangWatch(tmp_path, 60.0, process.terminate)
        ends = threading.Thread(target=watch._end_ranks, args=[{0: process.pid}], daemon=True)
        ends.start()
        ends.join(2.0 if works else 30.0)
        alive = is_alive(process.pid)
        watch.stop()
        process.kill()
    assert alive is works
    assert works or process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_what_a_rank_raised_is_told_while_torchrun_waits_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "_GRACE", 0.2)
    RankLog(tmp_path, RankStarted(0, 2, "gloo"))
    log = RankLog(tmp_path, RankStarted(1, 2, "gloo"))
    log.add(RankRaised(exception_data(ValueError("no such label: 7"), "", "")))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for file in tmp_path.glob("0-1-*"):
        file.rename(tmp_path / f"0-1-2-{ended.pid}{file.suffix}")
    told: list[str] = []
    watch = HangWatch(tmp_path, 60.0, lambda: None, told.append)
    deadline = time.monotonic() + 60.0
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.stop()
    assert told == ["rank 1 raised ValueError: no such label: 7; torchrun waits for rank 0 to end"]


IN_JOIN = f"""Current thread 0x1 (most recent call first):
  File "{threading.__file__}", line 1119 in join
  File "/home/me/train.py", line 25 in <module>
"""
OTHER_WAITS = WAITS.replace("Current thread", "Thread") + "\n"
OTHER_WORKS = 'Thread 0x2:\n  File "/home/me/train.py", line 7 in produce\n\n'


@pytest.mark.parametrize(
    ("main", "other", "lost_one", "waits"),
    [
        (IN_JOIN, OTHER_WAITS, False, True),
        (IN_JOIN, "", True, True),
        (IN_JOIN, "", False, False),  # for what, is not known
        (IN_JOIN, OTHER_WORKS, True, False),
        (WAITS, OTHER_WAITS, True, False),
    ],
)
def test_a_rank_whose_main_thread_waits_for_threads_that_wait(
    main: str, other: str, lost_one: bool, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "_LOCKED", 0.0)
    watch = HangWatch(tmp_path, 60.0, lambda: None)
    watch.stop()
    assert watch._waits_for_threads(os.getpid(), other + main, has_thread_error=lost_one) is waits


def test_a_rank_that_was_stopped_is_told_and_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            told: list[str] = []
            watch = HangWatch(tmp_path, 60.0, lambda: None, told.append)
            watch.stop()
            while not is_stopped(process.pid):
                time.sleep(0.01)
            for _ in range(2):
                watch._report_stopped({1: process.pid})
            assert told == [f"rank 1 was stopped by a signal; `kill -CONT {process.pid}` ends that"]
        finally:
            process.kill()


@pytest.mark.slow
def test_torchs_deadlock_at_the_end_is_told_and_the_run_is_clean() -> None:
    ended = run(DDPCHECK, "--check-timeout=4", str(ROOT / "tests" / "run_unended.py"))
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr
    assert "note: rank 0 has run all of the script, but did not exit for " in ended.stderr
    assert "ddpcheck: clean: 2 ranks (gloo), Linear (0 steps), Linear (12 steps)" in ended.stderr


SAVES_IN_A_THREAD = """
group = dist.new_group() if HOW == "own" else None
def upload(sizes):
    dist.all_gather_object(sizes, RANK, group=group)  # uploads
for step in range(3):
    dist.all_reduce(torch.ones(2))
    saver = threading.Thread(target=upload, args=([None, None],), name=f"saver-{step}")
    time.sleep(0.3 * RANK)
    saver.start()
    if RANK == 0:
        time.sleep(0.15)
    dist.barrier()
    saver.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["default", "own"])
def test_a_thread_that_uses_the_group_of_the_main_thread(group: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, SAVES_IN_A_THREAD, group, options=("--check-timeout=3",))
    assert run.code == (0 if group == "own" else 4), run.stderr
    if group == "default":
        assert "ddpcheck: all ranks wait for each other; ending the script\n" in run.stderr
        (message,) = (finding["message"] for finding in run.findings)
        line = 1 + next(number for number, text in enumerate(run.lines) if text.endswith("# uploads"))
        assert f"A thread (saver) calls all_gather_object at train.py:{line} in the default process group" in message


@pytest.mark.parametrize(
    ("seen", "living", "why"),
    [
        (Hang(3.0, {}), (0, 1), "all ranks wait for each other"),
        (Hang(3.0, {}), (1,), "rank 1 waits for a rank that does not arrive"),
        (NotExited(3.0, (0, 1)), (0, 1), "ranks 0 and 1 have run to the end of the script, and not ended"),
    ],
)
def test_why_a_script_is_ended_is_told_before(
    seen: Hang | NotExited, living: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    told: list[str] = []
    watch = HangWatch(tmp_path, 60.0, lambda: None, told.append)
    watch.stop()
    watch.hang, watch.not_exited = (seen, None) if isinstance(seen, Hang) else (None, seen)
    watch._report_end(living)
    assert told == [f"{why}; ending the script"]
