"""The facts with which a difference between gradients is explained, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import LOOSEST_FIT, Difference, Fit, ShardAnalysis
from ddpcheck.findings.evidence.modules import GradientHook, WrapperFacts
from ddpcheck.findings.evidence.steps import Call, DdpStepEvidence
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, group_by, one_finding

_ROUNDING_MULTIPLE = 3.0
Facts = TypeVar("Facts")
SMALLEST_FACTOR = 0.01  # what is nearer to 1 is no factor that somebody wrote


def group_by_step(evidence: Iterable[DdpStepEvidence]) -> dict[int, list[DdpStepEvidence]]:
    """The evidence of all ranks by step, in order."""
    return group_by(sorted(evidence, key=lambda item: item.step), lambda item: item.step)


def first_explanation(explanations: Sequence[Callable[[Facts], list[Finding]]], facts: Facts) -> list[Finding]:
    """The findings of the first explanation that has any."""
    return next((found for explain in explanations if (found := explain(facts))), [])


def worst_first(differences: Iterable[Difference]) -> list[Difference]:
    """Sorted by error, to two digits, so that the order is the same on every machine."""
    return sorted(differences, key=lambda item: -float(f"{item.error:.2g}"))


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """The step that the ranks ran without the wrapper, taken together."""

    losses: tuple[float, ...] = ()  # of each rank
    shard_sizes: tuple[int, ...] = ()  # samples of each rank, where they are known
    calls: tuple[Call, ...] = ()  # the collectives in the forward pass of rank 0
    differing_buffers: tuple[str, ...] = ()  # buffers that the step leaves different on the ranks
    backwards: tuple[int, int] = (1, 1)  # backward passes in a step, of the single process and of a rank
    # the generators from which the forward pass drew numbers that no two runs can share sample by sample
    drew_from: tuple[str, ...] = ()
    # operations of the forward pass that choose among many at random, where that may be all that differs
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """The facts beside a difference that may explain it."""

    names: Names  # of the parameters, with their aliases and lines
    wrapper: WrapperFacts  # the arguments of the wrapper
    world_size: int  # number of ranks; under tensor parallelism, of models that are trained data parallel
    local: LocalFacts = LocalFacts()  # the step without the wrapper
    module_locations: Mapping[str, Location] = field(default_factory=dict)  # the lines that made the modules
    broadcasts_buffers: bool = False  # whether the wrapper broadcasts buffers before a forward
    program_data: Sequence[Mapping[str, str]] = ()  # plain values of each rank's program, in words, by name
    changed_data: frozenset[str] = frozenset()  # the names of those that the steps have changed
    differing_at_start: frozenset[str] = frozenset()  # parameters that differed between ranks before the first step
    wrapper_class: str = ""  # the name of the wrapper's class
    nonlinear: tuple[str, ...] = ()  # parameters whose gradient does not double with the loss, on a rank
    hooks: tuple[GradientHook, ...] = ()  # hooks of the user's code on gradients
    # hooks registered while wrapping, which therefore exist under the wrapper only
    wrap_hooks: tuple[GradientHook, ...] = ()
    loss_location: Location | None = None  # the line that defines the loss
    gradients_differ: bool = False  # whether the ranks' average is another gradient than the global batch's
    own_hook: bool = False  # whether the communication hook is none of torch's; known where a script has registered it
    plain_optimizer: bool = False  # whether the optimizer is one of `torch.optim`, which averages nothing
    # the ranks that compute a model together, of each (tensor parallelism); none where each rank has its own
    models: Sequence[tuple[int, ...]] = ()

    @property
    def count_of_replicas(self) -> str:
        """What DDP divides by, in words."""
        return "the number of models" if self.models else "the world size"

    def factor(self, ratio: float) -> str:
        """A factor in words, where it is one that the number of replicas explains."""
        for text, value in ((f"1/{self.world_size}", 1 / self.world_size), (f"{self.world_size}", self.world_size)):
            if math.isclose(ratio, value, rel_tol=1e-2):
                return f"{text} ({'one over ' if value < 1 else ''}{self.count_of_replicas})"
        return f"{ratio:.4g}"


@dataclass(frozen=True, slots=True)
class SingleProcessFacts:
    """The facts on an averaged gradient that differs from the global batch's."""

    wrong: tuple[Difference, ...]  # the gradients that differ, in the first step that does
    steps: tuple[int, ...]  # the steps that differ; empty for all of them
    tolerance: float  # what a fit may leave as rounding
    analysis: ShardAnalysis  # of the shards, one by one in the single process
    known: JudgeContext  # the facts beside these
    evidence: tuple[str, ...]  # how far the gradients are, in words

    @property
    def largest_error(self) -> float:
        return max(item.error for item in self.wrong)

    @property
    def ran(self) -> bool:
        """Whether the shards could be run one by one."""
        return bool(self.analysis.terms)

    @property
    def world_changed(self) -> bool:
        """Whether the ranks computed something else than the shards give without a process group."""
        allowed = max(self.tolerance, _ROUNDING_MULTIPLE * self.analysis.shard_rounding)
        fit = self.analysis.against_shards
        return self.ran and (abs(fit.ratio - 1) > allowed or fit.residual > allowed)

    @property
    def scaled(self) -> bool:
        """Whether a constant factor accounts for the difference from the global batch."""
        return self.is_factor(self.analysis.against_global)

    @property
    def suspect_calls(self) -> list[Call]:
        """The collectives without derivative that may carry the loss, the most suspect first.

        A barrier, an object or a number that is only logged does not.
        """
        if self.ran and not self.world_changed:
            return []
        calls = [call for call in self.known.local.calls if not call.differentiable and call.elements > 0]
        calls = [call for call in calls if call.elements > 1 or call.carries_gradient]
        return sorted(calls, key=lambda call: (not call.carries_gradient, -call.elements))

    def is_factor(self, fit: Fit) -> bool:
        """Whether a constant factor other than 1 accounts for a difference."""
        off = abs(fit.ratio - 1)
        rounding = max(LOOSEST_FIT * off, min(self.tolerance, off / 5))
        return off > max(self.tolerance, SMALLEST_FACTOR) and fit.residual <= rounding

    def one_finding(self, code: str, message: str, *evidence: str, **more: Any) -> list[Finding]:
        """A finding on the loss, with how far the gradients are."""
        subjects = more.pop("subjects", ("loss",))
        return one_finding(code, subjects, message, steps=self.steps, evidence=[*evidence, *self.evidence], **more)
