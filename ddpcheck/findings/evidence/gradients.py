"""Evidence on differences between gradients, and of the single process: its batch, the shards, the terms of the loss.

Judged in `judge.gradients`; gathered in `gather.steps.gradient_distance`, `gather.phases.repeated_step`,
`gather.phases.single_process`, `gather.phases.shard_analysis` and `gather.phases.shard_terms`.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from ddpcheck.findings.evidence.modules import GradientHook
from ddpcheck.findings.report import Location


class Difference(Struct, frozen=True):
    """The difference of one gradient from its reference.

    Attributes:
        name: Of the parameter.
        error: Norm of the difference over the scale of the reference.
        tolerance: What `error` may be.
        ratio: The factor c for which c * reference is nearest; measured only beyond the tolerance.
        residual: What is left of `error` with that factor.
        elements: How many there are.
        elements_beyond: How many of them differ by more than their share of the tolerance.
        worst_index: Of the element that differs most.
        worst_got: Its value.
        worst_want: Its value in the reference.
        absolute_error: Norm of the difference.
        reference_norm: Norm of the reference.
    """

    name: str
    error: float
    tolerance: float
    ratio: float = 1.0
    residual: float = 0.0
    elements: int = 0
    elements_beyond: int = 0
    worst_index: tuple[int, ...] = ()
    worst_got: float = 0.0
    worst_want: float = 0.0
    absolute_error: float = 0.0
    reference_norm: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether the error is larger than it may be."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        text = f"{self.name}: relative error {self.error:.2g}, allowed {self.tolerance:.2g}"
        if self.worst_index or self.elements_beyond:
            where = f" at {self.worst_index}" if self.worst_index else ""
            text += f"; {self.elements_beyond} of {self.elements} elements, worst{where}: "
            text += f"{self.worst_got:.4g}, should be {self.worst_want:.4g}"
        return text


class RepeatedStep(Struct, frozen=True):
    """One rank's step, run a second time, and with the gradient of the loss doubled.

    Attributes:
        differences: From itself, run a second time.
        nonlinear: Parameters whose gradient does not double with the loss: something on its way changes it.
        hooks: What the user's code has put in its way.
    """

    differences: tuple[Difference, ...] = ()
    nonlinear: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()


RandomNumbers = Literal["drawn", "by sample", "constant"]
"""Which random numbers a step gets: those of its seed, those of each sample, or constants in their place."""

LOOSEST_FIT = 0.05
"""A pattern explains a difference when it leaves less than this share of it (and the rest is rounding)."""

EXACT_FIT = 1e-3
"""The share that rounding alone leaves, also of a gradient in float32."""


class LossTerm(Struct, frozen=True):
    """One term of the loss, on the global batch and on the shards one by one.

    Its errors are relative to the gradient of the whole loss, every parameter measured by its own scale.

    Attributes:
        name: Of the tensor that the recipe's loss returned ("loss['penalty']"), where there are several.
        location: The line that computes the term, where it is known.
        error: How far the shards' gradients, as the ranks weigh them, are from the global batch's.
        weights: Of the shards, for which the sum of their gradients is nearest to the global batch's.
        residual: What they leave of `error`.
        rank_weights: Of the shards in the ranks' average; empty where the ranks take the mean, or that is not known.
        ratio: The factor that this term's gradient has in the ranks' average, all terms taken together.
        doubles_with_batch: Whether it doubles when every sample is in the batch twice.
        count: What it is divided by, where that is found in the batch ("batch['labels'] != -100").
        counts: Its value on each rank.
        coupled: Whether its gradient for some samples depends on what the model computes for others; None where that
            could not be tried.
    """

    name: str = ""
    location: Location | None = None
    error: float = 0.0
    weights: tuple[float, ...] = ()
    residual: float = 0.0
    rank_weights: tuple[float, ...] = ()
    ratio: float = 1.0
    doubles_with_batch: bool = False
    count: str = ""
    counts: tuple[float, ...] = ()
    coupled: bool | None = None

    @property
    def is_sum(self) -> bool:
        """Whether the gradients of the shards add up to the global batch's."""
        return bool(self.weights) and all(math.isclose(weight, 1.0, rel_tol=1e-3) for weight in self.weights)

    @property
    def is_normalised(self) -> bool:
        """Whether it is a sum, or a mean over some count: then the weights of the shards are their shares of it."""
        fits = self.residual <= max(LOOSEST_FIT * self.error, 1e-9)
        return fits and (self.is_sum or bool(self.count) or math.isclose(sum(self.weights), 1.0, rel_tol=1e-2))


class Fit(Struct, frozen=True):
    """The factor between two gradients that is nearest, and the relative error that it leaves."""

    ratio: float = 1.0
    residual: float = 1.0


class WeightedFit(Struct, frozen=True):
    """The weights of several gradients whose sum is nearest to another, and the relative error that they leave."""

    weights: tuple[float, ...] = ()
    residual: float = 1.0


class Coupling(Struct, frozen=True):
    """The first place at which a sample of the batch depends on the others.

    Attributes:
        module: Name of the module whose output does while its input does not; empty for the whole; None if there is
            none.
        module_class: Its class; empty if there is none.
        line: Of the user's code at which an operation does.
        scaled: Whether what that operation gives is only scaled by the other samples, as by their number.
    """

    module: str | None = None
    module_class: str = ""
    line: Location | None = None
    scaled: bool = False


class ShardAnalysis(Struct, frozen=True):
    """Gradients of the shards, one by one in the single process; measured only when the global batch's differs.

    Without `terms` the shards could not be run, and only the global batch is known.

    Attributes:
        terms: Of the loss, in order.
        terms_residual: What the terms' `ratio` leave of the difference between the ranks' average and the global
            batch's gradient, relative.
        frozen: Modules whose batch statistics were fixed while the terms were looked at, since they couple all samples.
        against_shards: Of the mean of the shards' gradients to the ranks' average.
        shard_rounding: What the shards' gradients lose to rounding in the module's own dtype, relative.
        against_global: Of the global batch's gradient to the ranks' average.
        rank_weights: Of the shards' gradients, one by one, to the ranks' average.
        shard_losses: The loss on each shard.
        global_loss: The loss on the global batch.
        coupling: Where samples first depend on each other.
        rounded: The gradients that differ from the global batch's by rounding alone.
        error: Why the shards could not be run one by one, or why that could not be explained further.
        numbers: The random numbers with which they were run, as in `SingleStep`.
        by_statistics: Of the global batch's gradient to the ranks' average, where batch statistics are those of each
            shard; measured where shards alone do not give what the ranks did.
    """

    terms: tuple[LossTerm, ...] = ()
    terms_residual: float = 1.0
    frozen: tuple[str, ...] = ()
    against_shards: Fit = Fit()
    shard_rounding: float = 0.0
    against_global: Fit = Fit()
    rank_weights: WeightedFit = WeightedFit()
    shard_losses: tuple[float, ...] = ()
    global_loss: float = 0.0
    coupling: Coupling = Coupling()
    rounded: tuple[str, ...] = ()
    error: str = ""
    numbers: RandomNumbers = "drawn"
    by_statistics: Fit = Fit()

    @property
    def is_all_normalisation(self) -> bool:
        """Whether other weights of the shards, which each gave what its rank did, make the global batch's gradient."""
        alike = abs(self.against_shards.ratio - 1) <= EXACT_FIT and self.against_shards.residual <= EXACT_FIT
        wrong = [term for term in self.terms if term.error > EXACT_FIT]
        exact = all(term.residual <= EXACT_FIT * term.error and term.is_normalised for term in wrong)
        return alike and exact and bool(wrong) and not self.frozen and not any(term.coupled for term in wrong)


class SingleStep(Struct, frozen=True):
    """One step of the single process on the global batch.

    Attributes:
        loss: Of the global batch.
        norm: Of all gradients together.
        batch: Fingerprint of the batch.
        batch_again: Fingerprint of the batch made a second time (first step only).
        float64_error: Why there is no float64 run, empty when there is one.
        backwards: The user's own backward passes in the step, and the last one.
        numbers: The random numbers that it has got (see `RandomNumbers`).
    """

    loss: float
    norm: float
    batch: tuple[int, ...]
    batch_again: tuple[int, ...]
    float64_error: str
    backwards: int = 1
    numbers: RandomNumbers = "drawn"
