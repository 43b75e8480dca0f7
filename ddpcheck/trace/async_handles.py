"""Handles of asynchronous collectives, by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped, WorkUsed
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View


@dataclass(frozen=True, slots=True)
class AsyncHandles(View):
    """Handles that are freed unused or waited for, and tensors that are written too early."""

    checks: ClassVar[tuple[str, ...]] = ("collectives",)
    needs_all_ranks: ClassVar[bool] = False
    dropped: Sequence[Sequence[WorkDropped]]
    used: Sequence[Sequence[WorkUsed]]
    written: Sequence[Sequence[TensorOfWorkWritten]]

    @classmethod
    def of(cls, facts: ScriptFacts) -> Self:
        return cls(facts.of(WorkDropped), facts.of(WorkUsed), facts.of(TensorOfWorkWritten))
