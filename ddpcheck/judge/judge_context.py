"""What is known when a difference between gradients is to be explained, as plain data.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.evidence.collectives import Call
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import GradientHook, WrapperFacts
from ddpcheck.findings.evidence.single_process import LOOSEST_FIT, ShardAnalysis
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, make_finding

_ROUNDING_MULTIPLE = 3.0
SMALLEST_FACTOR = 0.01  # what is nearer to 1 is no factor that somebody wrote


def format_factor(ratio: float, world_size: int) -> str:
    """A factor in words, where it is one that the world size explains."""
    for text, value in ((f"1/{world_size}", 1 / world_size), (str(world_size), float(world_size))):
        if math.isclose(ratio, value, rel_tol=1e-2):
            return f"{text} (one over the world size)" if text.startswith("1/") else f"{text} (the world size)"
    return f"{ratio:.4g}"


def some_steps(steps: Sequence[int], of: int) -> tuple[int, ...]:
    """`steps`, or nothing where they are all of them."""
    return tuple(steps) if len(steps) < of else ()


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """What else is known when a difference is to be explained.

    Attributes:
        names: How to speak of parameters.
        wrapper: What the wrapper was told.
        world_size: Number of ranks.
        losses: Of each rank.
        shard_sizes: Samples a rank, where they are known.
        collectives: What the forward pass called, without a derivative, on rank 0.
        gathers: What it called at all.
        module_locations: The lines that made the modules.
        local_buffers: Buffers that a step by itself leaves different on the ranks.
        broadcasts_buffers: Whether the wrapper broadcasts buffers before a forward.
        held: Plain values that each rank's program holds, spelled, by name.
        changed: Those that the steps have changed.
        apart: Parameters that differed between ranks before the first step.
        wrapper_class: What the wrapper is.
        nonlinear: Parameters whose gradient does not double with the loss, on a rank.
        hooks: What the user's code puts in the way of gradients.
        backwards: Backward passes in a step, of the single process and of a rank.
        loss_location: The line that defines the loss.
        wrap_hooks: Those of them that are put there while wrapping, and so only under the wrapper.
        drew: The generators from which the forward pass drew numbers that no two runs can share sample by sample.
        choices: What chooses among many at random in the forward pass, where that may be all that differs.
        differs: Whether the ranks' average is another gradient than the global batch's.
    """

    names: Names
    wrapper: WrapperFacts
    world_size: int
    losses: tuple[float, ...] = ()
    shard_sizes: tuple[int, ...] = ()
    collectives: tuple[Call, ...] = ()
    gathers: tuple[Call, ...] = ()
    module_locations: Mapping[str, Location] = field(default_factory=dict)
    local_buffers: tuple[str, ...] = ()
    broadcasts_buffers: bool = False
    held: Sequence[Mapping[str, str]] = ()
    changed: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    wrapper_class: str = ""
    nonlinear: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()
    backwards: tuple[int, int] = (1, 1)
    loss_location: Location | None = None
    wrap_hooks: tuple[GradientHook, ...] = ()
    drew: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    differs: bool = False


@dataclass(frozen=True, slots=True)
class SingleProcessFacts:
    """What is known when the ranks' average differs from the global batch's gradient.

    Attributes:
        wrong: The gradients that differ, in the first step that does.
        steps: The steps that differ; empty for all of them.
        tolerance: What a fit may leave as rounding.
        analysis: What the single process says of the shards.
        known: What else is known.
        evidence: How far the gradients are, in words.
    """

    wrong: tuple[Difference, ...]
    steps: tuple[int, ...]
    tolerance: float
    analysis: ShardAnalysis
    known: JudgeContext
    evidence: tuple[str, ...]

    @property
    def far(self) -> float:
        """The largest relative error."""
        return max(item.error for item in self.wrong)

    @property
    def ran(self) -> bool:
        """Whether the shards could be run one by one."""
        return bool(self.analysis.terms)

    @property
    def world_changed(self) -> bool:
        """Whether the ranks computed something else than the shards give without a process group."""
        allowed = max(self.tolerance, _ROUNDING_MULTIPLE * self.analysis.world_rounding)
        return self.ran and (abs(self.analysis.world_ratio - 1) > allowed or self.analysis.world_residual > allowed)

    @property
    def scaled(self) -> bool:
        """Whether a constant factor accounts for the difference from the global batch."""
        return self.is_factor(self.analysis.global_ratio, self.analysis.global_residual)

    @property
    def scaled_by_world(self) -> bool:
        """Whether a constant factor accounts for the difference from the shards without a process group."""
        return self.world_changed and self.is_factor(self.analysis.world_ratio, self.analysis.world_residual)

    @property
    def blind(self) -> list[Call]:
        """The collectives without derivative that may carry the loss, the most suspect first."""
        if self.ran and not self.world_changed:
            return []
        calls = [call for call in self.known.collectives if _may_carry_the_loss(call)]
        return sorted(calls, key=lambda call: (not call.carries_gradient, -call.elements))

    def is_factor(self, ratio: float, residual: float) -> bool:
        """Whether a constant factor other than 1 accounts for a difference."""
        off = abs(ratio - 1)
        return off > max(self.tolerance, SMALLEST_FACTOR) and residual <= max(
            LOOSEST_FIT * off, min(self.tolerance, off / 5)
        )

    def finding(self, code: str, message: str, *evidence: str, **more: Any) -> Finding:
        """A finding on the loss, with how far the gradients are."""
        subjects = more.pop("subjects", ("loss",))
        return make_finding(code, subjects, message, steps=self.steps, evidence=[*evidence, *self.evidence], **more)


def _may_carry_the_loss(call: Call) -> bool:
    """Whether what comes out of a collective may be part of the loss: not a barrier, an object, or a logged number."""
    return not call.differentiable and call.elements > 0 and (call.elements > 1 or call.carries_gradient)
