"""Order of the training loop: what happens to gradients between backward passes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.loop import (
    MAX_PACE_RUNS,
    AutogradGradCalled,
    GradientsChanged,
    PaceRun,
    StaleGradients,
    WrapperPace,
)
from ddpcheck.findings.evidence.script import (
    GradientsClipped,
    GradientsZeroed,
    LossDifferentiated,
    OptimizerStep,
    ReducedInPlace,
)
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.trace.gradients import Clips, paired
from ddpcheck.trace.script_facts import ScriptFacts, steps_with_reductions
from ddpcheck.trace.unwrapped_params import Steps, all_gradients_agree, are_close
from ddpcheck.trace.view import View

MIN_NORM_CHANGE = 1e-4
"""Relative change of a gradient norm between two backward passes, above float32 rounding of a large gradient."""


@dataclass(frozen=True, slots=True)
class Loop(View):
    """Events of the training loop, by rank in order of time."""

    checks = ("loop",)
    world_size: int
    zeroed: Sequence[Sequence[GradientsZeroed]] = ()  # gradients zeroed before any step used them
    reduced_in_place: Sequence[Sequence[ReducedInPlace]] = ()  # collectives on tensors that backward needs
    accumulates: bool = False  # if an optimizer step follows several backward passes
    taken: Sequence[Sequence[Sequence[AutogradGradCalled]]] = ()  # torch.autograd.grad calls, by wrapper and rank
    stale: Sequence[Sequence[StaleGradients]] = ()  # gradients of earlier steps
    paces: Sequence[Sequence[WrapperPace]] = ()  # forward passes and batches per reduction, by wrapper and rank

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        taken = facts.events(AutogradGradCalled)
        by_wrapper = [
            [calls for entries in taken if (calls := [entry for entry in entries if entry.wrapper == number])]
            for number in sorted({entry.wrapper for entries in taken for entry in entries})
        ]
        paces = [
            [
                WrapperPace(tuple(runs), rank.counts[wrapper.number][1])
                for rank, runs in zip(wrapper.ranks, wrapper.events(PaceRun), strict=True)
                if 0 < len(runs) < MAX_PACE_RUNS
            ]
            for wrapper in facts.wrappers
        ]
        return cls(
            facts.world_size,
            facts.events(GradientsZeroed),
            facts.events(ReducedInPlace),
            any(step.reductions > step.count + 1 for steps in facts.events(OptimizerStep) for step in steps),
            by_wrapper,
            facts.events(StaleGradients),
            [p for wrapper, p in zip(facts.wrappers, paces, strict=True) if len(p) == len(wrapper.made.ranks)],
        )


@dataclass(frozen=True, slots=True)
class GradientChanges(View):
    """Gradient changes that the script makes, such as clipping; sequences are by rank."""

    checks = ("optimizers",)
    clips: Clips = ()
    between_backwards: Sequence[Sequence[GradientsChanged]] = ()
    steps: Sequence[Sequence[Steps]] = ()  # by optimizer
    # by optimizer and rank: steps with the reduction before each
    reduced: Sequence[Sequence[Sequence[tuple[OptimizerStep, ReplicaCaptured]]]] = ()
    losses: Sequence[Sequence[LossDifferentiated]] = ()

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        steps = [optimizer.steps for optimizer in facts.optimizers]
        reduced = [
            [[*steps_with_reductions(rank, [step[n] for step in opt_steps])] for n, rank in enumerate(facts.ranks)]
            for opt_steps in steps
            if all(len(step) == len(facts.ranks) for step in opt_steps)
        ]
        clips, changed = facts.events(GradientsClipped), facts.events(GradientsChanged)
        return cls(clips, changed, steps, reduced, facts.events(LossDifferentiated))

    @property
    def local_clips(self) -> list[Sequence[GradientsClipped]]:
        """Clip calls on local gradients, before averaging; each call is a sequence by rank."""
        calls = [c for c in paired(self.clips, lambda clip: (clip.count, clip.location)) if not c[0].of_parts]
        unequal = [call for call in calls if not are_close([clip.norm for clip in call])]
        steps = [step for optimizer_steps in self.steps for step in optimizer_steps]
        if any(len({(clip.step, clip.location) for clip in rank_clips}) < len(rank_clips) for rank_clips in self.clips):
            return []  # several clips per step, such as one per sample
        is_usual = len(unequal) > 1 and 2 * len(unequal) > len(calls)
        return unequal if is_usual and steps and all(map(all_gradients_agree, steps)) else []

    @property
    def changes_while_accumulating(self) -> list[Sequence[GradientsChanged]]:
        """Changes of accumulated gradients before a step's last micro-batch; each change is by rank.

        The result contains changes of local gradients by factors that differ between ranks. If these are too few, the
        result contains changes of averaged gradients by known clip functions instead.
        """
        changed = [[e for e in entries if abs(e.factor - 1) > MIN_NORM_CHANGE] for entries in self.between_backwards]
        changes = paired(changed, lambda entry: (entry.wrapper, entry.step, entry.by, entry.location))
        local = [change for change in changes if all(entry.is_unreduced for entry in change)]
        unequal = [change for change in local if not are_close([entry.factor for entry in change])]
        clipped = [change for change in changes if change[0].by and not any(entry.is_unreduced for entry in change)]
        shown = unequal if len(unequal) > 1 and 2 * len(unequal) > len(local) else clipped
        return shown if len(shown) > 1 else []
