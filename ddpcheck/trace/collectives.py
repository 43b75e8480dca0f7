"""Sequences of collectives, aligned over ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped
from ddpcheck.findings.evidence.steps import Call

DIVERGES_AT = "parts at "


def first_unequal_call(sequences: Sequence[Sequence[Call]]) -> tuple[int, tuple[Call | None, ...]] | None:
    """Return the index of the first mismatch, and the call of each log."""
    places = enumerate(itertools.zip_longest(*sequences))
    return next(((index, calls) for index, calls in places if len(set(map(call_signature, calls))) > 1), None)


def call_signature(call: Call | None) -> tuple[str, str] | None:
    return None if call is None else (call.operation, call.payload)


ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")


@dataclass(frozen=True, slots=True)
class EndedThread:
    """Thread, not the main thread, that ended with an exception."""

    name: str
    failure: RankFailure  # the exception, as a failure of the rank
    # call in which the main thread waits for a thread: "get() at train.py:25", or ""
    waits_in: str = ""


def thread_kind(call: Call) -> str:
    """Return the thread name without numbers, which may differ between ranks."""
    return re.sub(r"[\d_-]+$|\d+", "", call.thread)


ON_GRADIENTS = "of gradients"  # tag: the optimizer's gradients may not be the result


HandleEntry = WorkDropped | TensorOfWorkWritten
