"""Order of the training loop: what happens to gradients between backward passes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ddpcheck.findings.evidence.loop import GradientsLeft, GradientsTaken, PaceRun, WrapperPace
from ddpcheck.findings.evidence.script import GradientsZeroed, OptimizerStep, ReducedInPlace
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View

_MOST_RUNS = 1024  # recording limit, reached only without a regular pace


@dataclass(frozen=True, slots=True)
class Loop(View):
    """Events of the training loop, by rank in order of time."""

    check: ClassVar[str] = "loop"
    world_size: int
    zeroed: Sequence[Sequence[GradientsZeroed]] = ()  # gradients zeroed before any step used them
    reduced_in_place: Sequence[Sequence[ReducedInPlace]] = ()  # collectives on tensors that backward needs
    accumulates: bool = False  # if an optimizer step follows several backward passes
    taken: Sequence[Sequence[Sequence[GradientsTaken]]] = ()  # torch.autograd.grad calls, by wrapper and rank
    stale: Sequence[Sequence[GradientsLeft]] = ()  # gradients of earlier steps
    paces: Sequence[Sequence[WrapperPace]] = ()  # by wrapper and rank

    @classmethod
    def of(cls, facts: ScriptFacts) -> Self:
        taken = facts.of(GradientsTaken)
        by_wrapper = [
            [calls for entries in taken if (calls := [entry for entry in entries if entry.wrapper == number])]
            for number in sorted({entry.wrapper for entries in taken for entry in entries})
        ]
        paces = [
            [
                WrapperPace(tuple(runs), rank.counts[wrapper.number][1])
                for rank, runs in zip(wrapper.ranks, wrapper.of(PaceRun), strict=True)
                if 0 < len(runs) < _MOST_RUNS
            ]
            for wrapper in facts.wrappers
        ]
        return cls(
            facts.world_size,
            facts.of(GradientsZeroed),
            facts.of(ReducedInPlace),
            any(step.reductions > step.count + 1 for steps in facts.of(OptimizerStep) for step in steps),
            by_wrapper,
            facts.of(GradientsLeft),
            [p for wrapper, p in zip(facts.wrappers, paces, strict=True) if len(p) == len(wrapper.made.ranks)],
        )
