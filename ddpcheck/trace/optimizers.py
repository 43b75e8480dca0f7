"""Steps, state and schedules of optimizers, by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ddpcheck.findings.evidence.script import MetricUsed
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.unwrapped_params import Steps, are_local
from ddpcheck.trace.view import View

LOAD_EVERYWHERE = "Load the optimizer's state on every rank, from the same file, or begin with the same one on each."


def restored_on_some(rank_steps: Steps) -> dict[int, Location]:
    """Return the line that loaded optimizer state, by rank; {} if on all ranks."""
    restored = {rank: step.restored_at for rank, step in enumerate(rank_steps) if step.restored_at is not None}
    return restored if len(restored) < len(rank_steps) else {}


def describe_loads(restored: Iterable[int]) -> str:
    return f"load_state_dict is called there, on {format_ranks(restored)} only"


@dataclass(frozen=True, slots=True)
class Metrics(View):
    """Metrics by which schedules and callbacks of replicated optimizers decide."""

    check: ClassVar[str] = "optimizers"
    uses: Sequence[Sequence[MetricUsed]]  # by rank, in order of time

    @classmethod
    def of(cls, facts: ScriptFacts) -> Self:
        local = {opt.steps[0][0].optimizer for opt in facts.optimizers if opt.steps and are_local(opt.steps)}
        return cls([[use for use in uses if use.optimizer not in local] for uses in facts.of(MetricUsed)])
