"""Sequences of collectives, aligned over ranks, and handles of asynchronous collectives."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.endings import ScheduledCall
from ddpcheck.findings.evidence.loop import PendingTensorWritten, WorkAwaited, WorkDropped
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View

DIVERGES_AT = "parts at "


def first_unequal_call(sequences: Sequence[Sequence[Call]]) -> tuple[int, tuple[Call | None, ...]] | None:
    """Return index and calls (None: sequence ended) of the first mismatch, or None."""
    places = enumerate(itertools.zip_longest(*sequences))
    return next(((index, calls) for index, calls in places if len(set(map(call_signature, calls))) > 1), None)


def call_signature(call: Call | None) -> tuple[str, str] | None:
    return None if call is None else (call.operation, call.payload)


ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")


def thread_kind(call: Call) -> str:
    """Return the name of a call's thread without numbers, which may differ between ranks."""
    return re.sub(r"[\d_-]+$|\d+", "", call.thread)


ON_GRADIENTS = "of gradients"  # tag of a finding: the optimizer may use gradients before they are reduced
_Key = tuple[str, int]  # (process group, index of the collective in it)


def blocked_calls(schedules: Sequence[Sequence[ScheduledCall]]) -> Iterator[tuple[int, tuple[Call, Sequence[int]]]]:
    """Simulate the schedules; yield each rank that hangs, its collective, and the missing ranks."""
    places, numbers = [0] * len(schedules), [Counter[str]() for _ in schedules]
    arrived: dict[_Key, set[int]] = defaultdict(set)
    waiting: dict[_Key, list[int]] = defaultdict(list)
    ready = deque(range(len(schedules)))
    while ready:
        rank = ready.popleft()
        while places[rank] < len(schedules[rank]):
            scheduled = schedules[rank][places[rank]]
            key = scheduled.call.group, numbers[rank][scheduled.call.group]
            arrived[key].add(rank)
            if scheduled.waits and len(arrived[key]) < len(scheduled.call.members):
                waiting[key].append(rank)
                break
            places[rank] += 1
            numbers[rank][scheduled.call.group] += 1
            if len(arrived[key]) == len(scheduled.call.members):
                ready += waiting.pop(key, ())
    for key, blocked in waiting.items():
        for rank in blocked:
            call = schedules[rank][places[rank]].call
            yield rank, (call, [member for member in call.members if member not in arrived[key]])


@dataclass(frozen=True, slots=True)
class AsyncHandles(View):
    """Handles of asynchronous collectives, and writes to their tensors before the wait, by rank."""

    checks = ("collectives",)
    needs_all_ranks = False
    dropped: Sequence[Sequence[WorkDropped]]  # handles that were never polled or waited on
    used: Sequence[Sequence[WorkAwaited]]
    written: Sequence[Sequence[PendingTensorWritten]]

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        return cls(facts.events(WorkDropped), facts.events(WorkAwaited), facts.events(PendingTensorWritten))
