"""DDP408: asynchronous collectives, as ranks have followed their handles."""

from __future__ import annotations

import pytest

from ddpcheck.findings.evidence.loop import PendingTensorWritten, WorkAwaited, WorkDropped
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.causes import find_causes
from ddpcheck.rules.collectives.ddp408_result_not_awaited import judge_async_handles
from ddpcheck.trace.collectives import AsyncHandles
from tests.reports import assert_says

LINE, OTHER = Location("train.py", 10), Location("train.py", 20)


def test_a_handle_that_is_dropped_on_some_ranks() -> None:
    gone = WorkDropped("all_reduce", LINE, False)
    findings = judge_async_handles(AsyncHandles([[], [gone], [gone]], [[], [], []], [[], [], []]))
    assert_says(findings, "DDP408 ... ('all_reduce',) of ranks (1, 2) at train.py:10 ... Nothing waits")


def test_the_last_handle_of_a_line_that_waits_for_the_others_may_be_left() -> None:
    gone = WorkDropped("all_reduce", LINE, False)
    assert not judge_async_handles(AsyncHandles([[gone], [gone]], [[WorkAwaited(LINE)], [WorkAwaited(LINE)]], [[], []]))
    assert judge_async_handles(AsyncHandles([[gone], [gone]], [[WorkAwaited(OTHER)], []], [[], []]))


@pytest.mark.parametrize("of_gradients", [False, True])
def test_a_tensor_that_is_written_too_early_explains_steps_that_use_it(of_gradients: bool) -> None:
    written = PendingTensorWritten("all_reduce", LINE, of_gradients, OTHER)
    early = PendingTensorWritten("all_reduce", LINE, False, OTHER)  # before its optimizer was known
    found = judge_async_handles(AsyncHandles([[], []], [[WorkAwaited(LINE)]] * 2, [[early, written]] * 2))
    assert len(found) == 1 and found[0].ranks == () and "before the wait() at train.py:20" in found[0].message
    apart = Finding("DDP306", ("head.weight",), "It differs.", found[0].severity)
    told = find_causes([*found, apart]).findings
    assert [one.code for one in told] == (["DDP408"] if of_gradients else ["DDP408", "DDP306"])
