"""Facts of a check that explain a gradient mismatch, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import LOOSEST_FIT, Difference, Fit, ShardAnalysis
from ddpcheck.findings.evidence.modules import GradientHook, WrapperFacts
from ddpcheck.findings.evidence.steps import Call, DdpStepEvidence
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, group_by, new_finding
from ddpcheck.trace.factors import name_world_factor


def is_inverse_world_size(facts: SingleProcessFacts, ratio: float) -> bool:
    return abs(ratio * facts.known.world_size - 1) <= SMALLEST_FACTOR


def values_are_close(values: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(values, expected, strict=False)
    return len(values) == len(expected) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


_ROUNDING_MULTIPLE = 3.0
Facts = TypeVar("Facts")
SMALLEST_FACTOR = 0.01  # smallest distance from 1 of a deliberate factor


def group_by_step(evidence: Iterable[DdpStepEvidence]) -> dict[int, list[DdpStepEvidence]]:
    """Group the evidence of all ranks by step, steps ascending."""
    return group_by(sorted(evidence, key=lambda item: item.step), lambda item: item.step)


def first_explanation(explanations: Sequence[Callable[[Facts], list[Finding]]], facts: Facts) -> list[Finding]:
    """Return the findings of the first of `explanations` that returns any."""
    return next((findings for explain in explanations if (findings := explain(facts))), [])


def worst_first(differences: Iterable[Difference]) -> list[Difference]:
    """Sort by descending error, rounded to two digits for a reproducible order."""
    return sorted(differences, key=lambda item: -float(f"{item.error:.2g}"))


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """Facts of the step that ranks run without the wrapper, combined over all ranks."""

    losses: tuple[float, ...] = ()  # by rank
    shard_sizes: tuple[int, ...] = ()  # samples by rank, if known
    calls: tuple[Call, ...] = ()  # collectives in the forward pass of rank 0
    differing_buffers: tuple[str, ...] = ()  # buffers that differ between ranks after the step
    backwards: tuple[int, int] = (1, 1)  # backward passes per step: single process, rank
    # random generators used in forward whose numbers cannot be reproduced per sample
    drew_from: tuple[str, ...] = ()
    # random choices in forward that may explain the whole difference
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """Facts on wrapper, model and script that may explain a gradient mismatch."""

    names: Names  # parameter names, with aliases and lines
    wrapper: WrapperFacts  # arguments of the wrapper
    world_size: int  # number of ranks; with tensor parallelism, number of data parallel replicas
    local: LocalFacts = LocalFacts()  # the step without the wrapper
    module_locations: Mapping[str, Location] = field(default_factory=dict)  # construction line by module name
    broadcasts_buffers: bool = False  # if the wrapper broadcasts buffers before forward
    program_data: Sequence[Mapping[str, str]] = ()  # by rank: values of program variables as text
    changed_data: frozenset[str] = frozenset()  # names in `program_data` that change in the steps
    differing_at_start: frozenset[str] = frozenset()  # parameters that differ between ranks before step 0
    wrapper_class: str = ""  # class name of the wrapper
    nonlinear: tuple[str, ...] = ()  # parameters whose gradient does not double if the loss doubles
    hooks: tuple[GradientHook, ...] = ()  # user hooks on gradients
    # hooks registered while wrapping, so absent without the wrapper
    wrap_hooks: tuple[GradientHook, ...] = ()
    loss_location: Location | None = None  # the line that defines the loss
    gradients_differ: bool = False  # if the average over ranks differs from the global batch's gradient
    own_hook: bool = False  # if the communication hook is not torch's; known only if a script registers it
    plain_optimizer: bool = False  # if the optimizer is from `torch.optim`, which averages nothing
    # ranks of each model under tensor parallelism; empty if each rank has a whole model
    models: Sequence[tuple[int, ...]] = ()

    @property
    def count_of_replicas(self) -> str:
        """Divisor of DDP's average, in words: "the world size" or "the number of models"."""
        return "the number of models" if self.models else "the world size"

    def factor(self, ratio: float) -> str:
        """Format a factor: "4 (the world size)", "1/4 (one over the world size)", "0.37"."""
        text = name_world_factor(self.world_size, lambda factor: math.isclose(ratio, factor, rel_tol=1e-2))
        return f"{text} ({'one over ' if '/' in text else ''}{self.count_of_replicas})" if text else f"{ratio:.4g}"


@dataclass(frozen=True, slots=True)
class SingleProcessFacts:
    """Facts on averaged gradients that differ from the gradients of the global batch."""

    wrong: tuple[Difference, ...]  # mismatched gradients of the first mismatched step
    steps: tuple[int, ...]  # mismatched steps; empty if all
    tolerance: float  # largest relative residual of a fit that counts as rounding
    analysis: ShardAnalysis  # of the shards, which the single process runs one by one
    known: JudgeContext  # further facts
    evidence: tuple[str, ...]  # size of the mismatch, in words
    largest_error_of_steps: float = 0.0  # of all mismatched steps, relative

    @property
    def largest_error(self) -> float:
        return max(item.error for item in self.wrong)

    @property
    def ran(self) -> bool:
        """Check if the single process could run the shards, one after another."""
        return bool(self.analysis.terms)

    @property
    def world_changed(self) -> bool:
        """Check if the same shard gives different gradients with and without a process group."""
        allowed = max(self.tolerance, _ROUNDING_MULTIPLE * self.analysis.shard_rounding)
        fit = self.analysis.against_shards
        return self.ran and (abs(fit.ratio - 1) > allowed or fit.residual > allowed)

    @property
    def scaled(self) -> bool:
        """Check if a constant factor explains the difference from the global batch's gradients."""
        return self.is_factor(self.analysis.against_global)

    @property
    def has_common_factor(self) -> bool:
        """Check if only a constant factor, not a collective on tensors, explains the difference."""
        exchanges_tensors = any(call.elements > 1 for call in self.suspect_calls)
        return self.scaled and not exchanges_tensors and (not self.ran or self.world_changed)

    @property
    def losses_are_scaled(self) -> bool:
        """Check if the gradients' factor also relates losses on ranks to single-process losses."""
        pairs = zip(self.analysis.shard_losses, self.known.local.losses, strict=False)
        logs = [math.log(on_rank / of_shard) for of_shard, on_rank in pairs if of_shard * on_rank > 0]
        ratio, mean_log = self.analysis.against_global.ratio, sum(logs) / max(1, len(logs))
        return ratio > 0 and abs(mean_log - math.log(ratio)) < abs(mean_log)

    @property
    def suspect_calls(self) -> list[Call]:
        """Non-differentiable collectives that may carry the loss, most suspicious first.

        Barriers, object collectives and logged scalars are left out.
        """
        if self.ran and not self.world_changed:
            return []
        calls = [call for call in self.known.local.calls if not call.differentiable and call.elements > 0]
        calls = [call for call in calls if call.elements > 1 or call.carries_gradient]
        return sorted(calls, key=lambda call: (not call.carries_gradient, -call.elements))

    def is_factor(self, fit: Fit) -> bool:
        """Check if `fit` is a constant factor (not 1) with a residual within rounding."""
        off = abs(fit.ratio - 1)
        rounding = max(LOOSEST_FIT * off, min(self.tolerance, off / 5))
        return off > max(self.tolerance, SMALLEST_FACTOR) and fit.residual <= rounding

    def new_finding(self, code: str, message: str, *evidence: str, **more: Any) -> list[Finding]:
        """Create a finding on the loss, with the gradient mismatch's size as evidence."""
        subjects = more.pop("subjects", ("loss",))
        return new_finding(code, subjects, message, steps=self.steps, evidence=[*evidence, *self.evidence], **more)
