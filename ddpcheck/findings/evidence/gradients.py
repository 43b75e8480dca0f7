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

LEAST = 1e-30
"""Norms below it are of subnormal numbers of float32, which have no relative precision, or of sums of such numbers."""


def relative(difference: float, scale: float) -> float:
    """A difference over the scale of what differs; 0.0 if the difference is at most `LEAST`."""
    if difference <= LEAST:
        return 0.0
    return difference / scale if scale else 1.0


class Difference(Struct, frozen=True):
    """The difference of one gradient from its reference."""

    name: str  # of the parameter
    error: float  # norm of the difference over the scale of the reference
    tolerance: float  # what `error` may be
    ratio: float = 1.0  # the factor c for which c * reference is nearest; measured only beyond the tolerance
    residual: float = 0.0  # what is left of `error` with that factor
    elements: int = 0  # how many there are
    elements_beyond: int = 0  # how many of them differ by more than their share of the tolerance
    worst_index: tuple[int, ...] = ()  # of the element that differs most
    worst_got: float = 0.0  # its value
    worst_want: float = 0.0  # its value in the reference
    absolute_error: float = 0.0  # norm of the difference
    reference_norm: float = 0.0  # norm of the reference

    @property
    def bad(self) -> bool:
        """Whether the error is larger than it may be."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        if not self.reference_norm and not self.elements_beyond and 0 < self.absolute_error < self.error:
            return f"{self.name}: of norm {self.absolute_error:.2g}, should be zero"
        text = f"{self.name}: relative error {self.error:.2g}, allowed {self.tolerance:.2g}"
        if self.worst_index or self.elements_beyond:
            where = f" at {self.worst_index}" if self.worst_index else ""
            text += f"; {self.elements_beyond} of {self.elements} elements, worst{where}: "
            text += f"{self.worst_got:.4g}, should be {self.worst_want:.4g}"
        return text


class RepeatedStep(Struct, frozen=True):
    """One rank's step, run a second time, and with the gradient of the loss doubled."""

    differences: tuple[Difference, ...] = ()  # from itself, run a second time
    # parameters whose gradient does not double with the loss: something on its way changes it
    nonlinear: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()  # what the user's code has put in its way


RandomNumbers = Literal["drawn", "by sample", "constant"]
"""Which random numbers a step gets: those of its seed, those of each sample, or constants in their place."""

LOOSEST_FIT = 0.05
"""A pattern explains a difference when it leaves less than this share of it (and the rest is rounding)."""

EXACT_FIT = 1e-3  # the share that rounding alone leaves, also of a gradient in float32


class LossTerm(Struct, frozen=True):
    """One term of the loss, on the global batch and on the shards one by one.

    Its errors are relative to the gradient of the whole loss, every parameter measured by its own scale.
    """

    name: str = ""  # of the tensor that the recipe's loss returned ("loss['penalty']"), where there are several
    location: Location | None = None  # the line that computes the term, where it is known
    error: float = 0.0  # how far the shards' gradients, as the ranks weigh them, are from the global batch's
    # of the shards, for which the sum of their gradients is nearest to the global batch's
    weights: tuple[float, ...] = ()
    residual: float = 0.0  # what they leave of `error`
    # of the shards in the ranks' average; empty where the ranks take the mean, or that is not known
    rank_weights: tuple[float, ...] = ()
    ratio: float = 1.0  # the factor that this term's gradient has in the ranks' average, all terms taken together
    doubles_with_batch: bool = False  # whether it doubles when every sample is in the batch twice
    count: str = ""  # what it is divided by, where that is found in the batch ("batch['labels'] != -100")
    counts: tuple[float, ...] = ()  # its value on each rank
    # whether its gradient for some samples depends on what the model computes for others; None where that could not be
    # tried
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
    """The first place at which a sample of the batch depends on the others."""

    # name of the module whose output does while its input does not; empty for the whole; None if there is none
    module: str | None = None
    module_class: str = ""  # its class; empty if there is none
    line: Location | None = None  # of the user's code at which an operation does
    scaled: bool = False  # whether what that operation gives is only scaled by the other samples, as by their number


class ShardAnalysis(Struct, frozen=True):
    """Gradients of the shards, one by one in the single process; measured only when the global batch's differs.

    Without `terms` the shards could not be run, and only the global batch is known.
    """

    terms: tuple[LossTerm, ...] = ()  # of the loss, in order
    # what the terms' `ratio` leave of the difference between the ranks' average and the global batch's gradient,
    # relative
    terms_residual: float = 1.0
    # modules whose batch statistics were fixed while the terms were looked at, since they couple all samples
    frozen: tuple[str, ...] = ()
    against_shards: Fit = Fit()  # of the mean of the shards' gradients to the ranks' average
    shard_rounding: float = 0.0  # what the shards' gradients lose to rounding in the module's own dtype, relative
    against_global: Fit = Fit()  # of the global batch's gradient to the ranks' average
    rank_weights: WeightedFit = WeightedFit()  # of the shards' gradients, one by one, to the ranks' average
    shard_losses: tuple[float, ...] = ()  # the loss on each shard
    global_loss: float = 0.0  # the loss on the global batch
    coupling: Coupling = Coupling()  # where samples first depend on each other
    rounded: tuple[str, ...] = ()  # the gradients that differ from the global batch's by rounding alone
    # parameters that the losses of the shards reach and that of the global batch does not, or the other way round
    other_parameters: tuple[str, ...] = ()
    error: str = ""  # why the shards could not be run one by one, or why that could not be explained further
    numbers: RandomNumbers = "drawn"  # the random numbers with which they were run, as in `SingleStep`
    # of the global batch's gradient to the ranks' average, where batch statistics are those of each shard; measured
    # where shards alone do not give what the ranks did
    by_statistics: Fit = Fit()

    @property
    def is_all_normalisation(self) -> bool:
        """Whether other weights of the shards, which each gave what its rank did, make the global batch's gradient."""
        alike = abs(self.against_shards.ratio - 1) <= EXACT_FIT and self.against_shards.residual <= EXACT_FIT
        wrong = [term for term in self.terms if term.error > EXACT_FIT]
        exact = all(term.residual <= EXACT_FIT * term.error and term.is_normalised for term in wrong)
        return alike and exact and bool(wrong) and not self.frozen and not any(term.coupled for term in wrong)


class SingleStep(Struct, frozen=True):
    """One step of the single process on the global batch."""

    loss: float  # of the global batch
    norm: float  # of all gradients together
    batch: tuple[int, ...]  # fingerprint of the batch
    batch_again: tuple[int, ...]  # fingerprint of the batch made a second time (first step only)
    float64_error: str  # why there is no float64 run, empty when there is one
    backwards: int = 1  # the user's own backward passes in the step, and the last one
    numbers: RandomNumbers = "drawn"  # the random numbers that it has got (see `RandomNumbers`)
