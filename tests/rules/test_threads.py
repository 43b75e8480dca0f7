"""Threads that an exception has ended, and ranks whose main thread waits for one."""

from __future__ import annotations

import json
import queue
import threading

import pytest

from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.stacks import collectives_of_threads
from ddpcheck.findings.wording import new_finding
from ddpcheck.rules.collectives.ddp401_rank_raised import (
    describe_threads,
    explain_by_awaited_thread,
    explain_by_ended_thread,
)
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_interleaving
from ddpcheck.trace.failures import EndedThread, FailureFacts
from ddpcheck.worlds import failures
from ddpcheck.worlds.failures import exception_data
from tests.reports import assert_says

OTHER = failures.failure_of_running_rank(0, 0.0, "", "", "barrier at train.py:41")


def hung(*threads: EndedThread) -> FailureFacts:
    return FailureFacts([OTHER], [[], []], hang_seconds=9.0, threads=threads)


def ended(error: Exception, waits_in: str = "get() at train.py:25", rank: int = 1) -> EndedThread:
    raised = failures.failure_of_exception(rank, {**exception_data(error, "", ""), "location": "data.py:7"})
    return EndedThread("producer", raised, waits_in)


def test_an_exception_in_a_thread_for_which_its_rank_waits_is_the_cause() -> None:
    findings = explain_by_awaited_thread(hung(ended(ValueError("bad sample"))))
    words = "(producer) ... another thread in get() at train.py:25. | ... rank 0: waits in barrier at train.py:41"
    assert_says(findings, f"DDP401 ... of ranks (1,) at data.py:7 ... {words}")
    findings = explain_by_awaited_thread(hung(*(ended(ValueError("bad sample"), rank=rank) for rank in (0, 1))))
    assert_says(findings, "of ranks () ... : Ranks 0 and 1 raised ValueError: bad sample")


def test_one_that_its_rank_does_not_wait_for_is_evidence_only() -> None:
    logger = hung(ended(ValueError("no disk"), ""))
    assert explain_by_awaited_thread(logger) == []
    assert describe_threads(logger) == [
        "before that, rank 1 raised ValueError: no disk in a thread (producer) at data.py:7"
    ]
    lost = hung(ended(RuntimeError("Connection closed by peer")))  # another rank is the cause
    assert explain_by_awaited_thread(lost) == describe_threads(lost) == []


def test_a_line_at_which_a_thread_was_left_is_no_skipped_step() -> None:
    (skipped,) = new_finding("DDP508", ("backward",), "Rank 1 skips.", ranks=[1], location=Location("data.py", 7))
    facts = hung(ended(ValueError("bad sample"), ""))
    words = "has ended a thread (producer). | ... Rank 1 skips."
    assert_says(explain_by_ended_thread(facts, skipped), f"DDP401 ... of ranks (1,) at data.py:7 ... {words}")
    assert not explain_by_ended_thread(facts, replace(skipped, ranks=(0,)))
    assert not explain_by_ended_thread(facts, replace(skipped, location=Location("data.py", 8)))


IN_QUEUE = f"""Current thread 0x1 (most recent call first):
  File "{threading.__file__}", line 327 in wait
  File "{queue.__file__}", line 171 in get
  File "/home/me/train.py", line 25 in <module>
"""
IN_BARRIER = """Current thread 0x1 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 41 in main
"""


def test_a_rank_that_waits_for_a_thread_is_told_by_what_has_ended_it() -> None:
    error = json.dumps(["feeder", {**exception_data(ValueError("bad sample"), "", ""), "exception": None}])
    failure = failures.thread_failure(1, IN_QUEUE, error)
    words = "rank 1 waits in get() at train.py:25 for a thread (feeder) that raised ValueError: bad sample"
    assert failure is not None and (failure.message, failure.kind) == (words, "raised")
    at_work = 'Thread 0x2:\n  File "/home/me/train.py", line 7 in produce\n\n' + IN_QUEUE
    torchs = 'Thread 0x2:\n  File "/x/site-packages/torch/utils/data/_utils/pin_memory.py", line 7 in loop\n\n'
    assert failures.thread_failure(1, torchs + IN_QUEUE, error) is not None
    for dump, text in ((IN_QUEUE, ""), (IN_BARRIER, error), (at_work, error)):
        assert failures.thread_failure(1, dump, text) is None


def test_collectives_of_other_threads_are_told() -> None:
    in_thread = IN_BARRIER.replace("Current thread", "Thread")
    assert collectives_of_threads(f"{in_thread}\n{IN_QUEUE}") == ["barrier at train.py:41"]
    assert collectives_of_threads(IN_BARRIER) == []
    library = 'Thread 0x2:\n  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n\n'
    assert collectives_of_threads(library + IN_QUEUE) == ["all_reduce"]  # without a line of the program


STEP = Call("all_reduce", "0", (0, 1), "float32 of shape (9,)", location="train.py:30", callers=("train.py:30",))
END = Call("barrier", "0", (0, 1), location="train.py:41", callers=("train.py:41",))
WORDS = {"group_words": "the default process group"}


def of_thread(name: str = "Writer-1", operation: str = "gather_object", group: str = "0") -> Call:
    return Call(operation, group, (0, 1), location="save.py:7", callers=("save.py:7",), thread=name, **WORDS)


def interleaving(*logs: list[Call], waiting: tuple[int, ...] = ()) -> list[Finding]:
    waits = [("gather_object",) if rank in waiting else () for rank in range(2)]
    return judge_interleaving([RankAtEnd(n, log, doing="waits", in_threads=waits[n]) for n, log in enumerate(logs)])


def test_two_threads_of_a_rank_that_use_one_group_are_the_cause_of_another_order() -> None:
    findings = interleaving([STEP, of_thread(), END], [STEP, END, of_thread("Writer-2")])
    words = "A thread (Writer) calls gather_object at save.py:7 in the default process group ... its own process group"
    assert_says(findings, f"DDP403 ... of ranks () at save.py:7 ... {words} ... calls barrier at train.py:41")


def test_two_threads_that_began_alike_and_both_wait() -> None:
    log = [STEP, of_thread(), END]
    assert interleaving(log, log, waiting=(1,)) and not interleaving(log, log)
    later = [*log, STEP, of_thread("Writer-2"), END]  # the first step went well, and its thread has another name
    assert_says(interleaving(later, later, waiting=(1,)), "the main thread calls barrier at train.py:41")


@pytest.mark.parametrize(
    ("rank_0", "rank_1"),
    [
        ([STEP, of_thread(group="3"), END], [STEP, END, of_thread(group="3")]),  # of a group of its own
        ([STEP, of_thread(), END], [STEP, END]),  # of one rank alone
        ([STEP, STEP, of_thread()], [STEP, of_thread(), END]),  # a rank has made a step less before it
        ([STEP, of_thread(), STEP], [STEP, END, of_thread()]),  # the main threads part
        ([of_thread("a"), of_thread("a")], [of_thread("a")]),  # in one thread
    ],
)
def test_threads_that_are_not_the_cause(rank_0: list[Call], rank_1: list[Call]) -> None:
    assert not interleaving(rank_0, rank_1, waiting=(0,))
