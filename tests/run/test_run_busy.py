"""Ranks that are busy: because they spin while they wait for each other, or because they work while others wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.stacks import main_stack, work_waited_for
from ddpcheck.gather.collectives import collective_log
from ddpcheck.run.hang_watch import HangWatch
from ddpcheck.run.live_ranks import RankFacts
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.log_file import is_inside
from ddpcheck.stream.rank_log import RankLog, read_logs
from ddpcheck.worlds.deadlock import processor_seconds
from tests.forked_run import ROOT, run_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "backend"), [("works", "spinning"), ("sleeps before a handle", "gloo")])
def test_a_rank_that_works_while_others_spin_or_wait_for_a_handle_is_no_hang(
    how: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "site-packages").mkdir()  # so that the backend's lines are not the script's
    (folder / "spinning_backend.py").write_text((ROOT / "tests" / "spinning_backend.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(folder))
    ended = run_forked("--check-timeout=3", str(ROOT / "tests" / "run_busy.py"), how, backend)
    assert ended.returncode == 0 and "ddpcheck: clean: " in ended.stderr, ended.stderr


TORCH = "/x/site-packages/torch"
C10D = f'  File "{TORCH}/distributed/distributed_c10d.py", line'
WAITS = f'{C10D} 5 in barrier\n  File "/home/me/a.py", line 41 in main\n'
TOKENISES = '  File "/home/me/a.py", line 7 in tokenise\n'
PICKLES = f"{TOKENISES}{C10D} 3 in _object_to_tensor\n{WAITS}"
BACKWARD = f'  File "{TORCH}/autograd/graph.py", line 8 in _engine_run_backward\n{TOKENISES}'

IDLE, BUSY = RankFacts(is_idle=True), RankFacts(is_idle=False, spins=True)
INSIDE = RankFacts(is_idle=False, spins=True, is_inside=True)
PARTED = RankFacts(is_idle=False, spins=True, others_idle=False, diverged=True)


@pytest.mark.parametrize(
    ("facts", "stack", "waits"),
    [
        (IDLE, WAITS, True),
        (IDLE, TOKENISES, False),  # it reads a file, or sleeps
        (RankFacts(is_idle=True, is_inside=True), TOKENISES, True),  # in handle.wait(), of which C++ leaves no frame
        (RankFacts(is_idle=True, is_inside=True), PICKLES, False),
        (INSIDE, WAITS, True),
        (INSIDE, "", False),
        (BUSY, WAITS, False),
        (RankFacts(is_idle=False, is_inside=True), WAITS, False),  # with gloo, which moves data
        (RankFacts(is_idle=False, spins=True, others_idle=False, is_inside=True), WAITS, False),
        (PARTED, WAITS, True),
        (PARTED, BACKWARD, True),
        (PARTED, f'  File "/x/site-packages/spin.py", line 9 in wait\n{BACKWARD}', True),
        (PARTED, TOKENISES, False),
        (PARTED, PICKLES, False),
        (RankFacts(is_idle=False, diverged=True), BACKWARD, False),  # with gloo: it computes
    ],
)
def test_what_tells_a_rank_that_waits_from_one_that_works(facts: RankFacts, stack: str, waits: bool) -> None:
    assert facts.waits(main_stack(f"Current thread 0x1 (most recent call first):\n{stack}")) is waits


def test_a_busy_rank_at_a_line_that_blocks_waits_where_collectives_do_not_match(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("total += loss.item()\ntotal += count(words)\n")
    for line, waits in ((1, True), (2, False)):
        stack = main_stack(f'Current thread 0x1:\n  File "{tmp_path}/a.py", line {line} in main\n')
        assert (PARTED.waits(stack), BUSY.waits(stack)) == (waits, False)


@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        ((["all_reduce", "backward", "metric"], ["all_reduce", "metric"]), True),  # rank 0 has only enqueued it
        ((["all_reduce", "backward"], ["all_reduce"]), False),  # rank 1 may still come
        ((["gather of 2", "barrier"], ["gather of 3", "barrier"]), False),  # has paired up
        ((["gather of 2", "barrier"], ["gather of 3"]), True),
    ],
)
def test_ranks_part_at_what_one_of_them_has_called_last(
    tmp_path: Path, ranks: tuple[Sequence[str], ...], part: bool
) -> None:
    for rank, calls in enumerate(ranks):
        log = RankLog(tmp_path, RankStarted(rank, len(ranks), "spinning"))
        for operation in calls:
            log.add_call(Call(operation, "0", (0, 1)))
    watch = HangWatch(tmp_path, 60.0, lambda: None)
    watch.stop()
    assert watch._diverge_now([0, 1]) is part
    if ranks[1] == ["all_reduce"]:
        assert watch._diverge_now([0])  # rank 1 has ended


# What ranks record


def test_a_rank_writes_whether_its_main_thread_is_in_a_collective(tmp_path: Path) -> None:
    log = RankLog(tmp_path, RankStarted(0, 2, "spinning"))
    path = log.path.with_suffix(".calls")
    log.add_call(Call("barrier", "0", (0, 1)))
    seen = [is_inside(path)]
    for begins in (True, True, False, False):  # one inside of another
        log.count_turn(begins=begins)
        seen.append(is_inside(path))
    thread = threading.Thread(target=lambda: log.count_turn(begins=True))
    thread.start()
    thread.join()
    assert [*seen, is_inside(path)] == [False, True, True, True, False, False]
    assert [call.operation for call in read_logs(tmp_path)[0].calls] == ["barrier"]


def test_a_wait_that_ddpcheck_records_is_told_with_its_line() -> None:
    recorded = f'  File "{collective_log.__file__}", line 9 in wait\n{TOKENISES}'
    assert work_waited_for(f"Current thread 0x1:\n{recorded}").startswith("wait() at ")
    assert not work_waited_for(f"Current thread 0x1:\n{TOKENISES}")
    assert not work_waited_for(f"Thread 0x2:\n{recorded}\n\nCurrent thread 0x1:\n{TOKENISES}")


SPIN = "print(flush=True)\nwhile True: pass"
BESIDE = f"import threading, time; threading.Thread(target=exec, args=[{SPIN!r}]).start(); time.sleep(60)"


@pytest.mark.slow
@pytest.mark.parametrize(("source", "is_main"), [(SPIN, True), (BESIDE, False)], ids=["main", "beside"])
def test_the_time_beside_the_main_thread_is_told_apart(source: str, is_main: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.0)
        whole, beside = (processor_seconds(process.pid, exclude_main_thread=main) for main in (False, True))
        process.kill()
    assert whole is None and ((beside is not None and beside < 0.1) if is_main else beside is None)
