"""Evidence on gradient differences, and on the single process: batch, shards, loss terms."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from ddpcheck.findings.evidence.modules import GradientHook
from ddpcheck.findings.report import Location

LEAST = 1e-30
"""Norms below it are of subnormal numbers of float32, which have no relative precision, or of sums of such numbers."""


def relative(difference: float, scale: float) -> float:
    """Return `difference` / `scale`, or 0.0 if `difference` is at most `LEAST`."""
    if difference <= LEAST:
        return 0.0
    return difference / scale if scale else 1.0


class Difference(Struct, frozen=True):
    """Difference of one gradient from its reference."""

    name: str  # of the parameter
    error: float  # norm of the difference over the scale of the reference
    tolerance: float  # maximum allowed `error`
    ratio: float = 1.0  # best-fit factor c of c * reference; measured only beyond the tolerance
    residual: float = 0.0  # remaining `error` after scaling by `ratio`
    elements: int = 0  # number of elements
    elements_beyond: int = 0  # number of elements that differ by more than the tolerance per element
    worst_index: tuple[int, ...] = ()  # of the element that differs most
    worst_got: float = 0.0  # value of the worst element
    worst_want: float = 0.0  # value of the worst element in the reference
    absolute_error: float = 0.0  # norm of the difference
    reference_norm: float = 0.0  # norm of the reference

    @property
    def bad(self) -> bool:
        """True if the error exceeds the tolerance, or is NaN."""
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
    """Result of repeating a step unchanged, and with the gradient of the loss doubled."""

    differences: tuple[Difference, ...] = ()  # between the step and the repeated step
    nonlinear: tuple[str, ...] = ()  # parameters whose gradient does not double with the loss
    hooks: tuple[GradientHook, ...] = ()  # the user's hooks on gradients


RandomNumbers = Literal["drawn", "by sample", "constant"]
"""Which random numbers a step gets: those of its seed, those of each sample, or constants in their place."""

LOOSEST_FIT = 0.05
"""An explanation of a difference counts if at most this share of the difference remains unexplained."""

EXACT_FIT = 1e-3  # share left by rounding alone, even for float32 gradients


class LossTerm(Struct, frozen=True):
    """Gradients of one loss term on the shards, compared with the global batch.

    Errors are relative to the gradient of the whole loss, with a separate scale for each parameter.
    """

    name: str = ""  # of the tensor in the recipe's loss ("loss['penalty']"), if there are several
    location: Location | None = None  # line that computes the term, if known
    error: float = 0.0  # error of the shards' gradients, weighted as by the ranks, against the global batch's gradient
    weights: tuple[float, ...] = ()  # of the shards, for the gradient sum nearest to the global batch's gradient
    residual: float = 0.0  # remaining `error` with `weights`
    rank_weights: tuple[float, ...] = ()  # of the shards in the ranks' average; empty if a mean, or unknown
    ratio: float = 1.0  # factor of this term's gradient in the ranks' average, fitted for all terms together
    doubles_with_batch: bool = False  # True if the term doubles when every sample is in the batch twice
    count: str = ""  # divisor of the term, if found in the batch ("batch['labels'] != -100")
    counts: tuple[float, ...] = ()  # value of `count` on each rank
    # True if the gradient of some samples depends on model outputs for other samples; None if not tested
    coupled: bool | None = None

    @property
    def is_sum(self) -> bool:
        """True if the gradients of the shards add up to the global batch's gradient."""
        return bool(self.weights) and all(math.isclose(weight, 1.0, rel_tol=1e-3) for weight in self.weights)

    @property
    def is_normalised(self) -> bool:
        """True if the term is a sum, or a mean over some count."""
        fits = self.residual <= max(LOOSEST_FIT * self.error, 1e-9)
        return fits and (self.is_sum or bool(self.count) or math.isclose(sum(self.weights), 1.0, rel_tol=1e-2))


class Fit(Struct, frozen=True):
    """Best-fit factor between two gradients, and the remaining relative error."""

    ratio: float = 1.0
    residual: float = 1.0


class WeightedFit(Struct, frozen=True):
    """Weights of several gradients whose sum best fits another gradient, and the remaining error."""

    weights: tuple[float, ...] = ()
    residual: float = 1.0


class Coupling(Struct, frozen=True):
    """First operation whose result for one sample depends on other samples of the batch."""

    module: str | None = None  # first module with coupled output but not input; "" for the model; None if none
    module_class: str = ""  # class of the module; "" if none
    line: Location | None = None  # line of user code with the coupled operation
    scaled: bool = False  # True if the other samples only scale the output of the operation, as by their number


class ShardAnalysis(Struct, frozen=True):
    """Explanation of the difference between the ranks' averaged gradients and the global batch's gradients.

    The single process runs each shard. If a shard fails, `terms` is empty, and only the global batch is known.
    """

    terms: tuple[LossTerm, ...] = ()  # of the loss, in order
    # relative difference of the ranks' average from the global batch's gradient that `ratio` of the terms leaves
    terms_residual: float = 1.0
    frozen: tuple[str, ...] = ()  # modules whose batch statistics, which couple all samples, were fixed for `terms`
    against_shards: Fit = Fit()  # of the mean of the shards' gradients to the ranks' average
    shard_rounding: float = 0.0  # relative rounding error of the shards' gradients in the dtype of the module
    against_global: Fit = Fit()  # of the global batch's gradient to the ranks' average
    rank_weights: WeightedFit = WeightedFit()  # of the shards' gradients to the ranks' average
    shard_losses: tuple[float, ...] = ()  # loss on each shard
    global_loss: float = 0.0  # loss on the global batch
    coupling: Coupling = Coupling()  # where samples first depend on each other
    rounded: tuple[str, ...] = ()  # gradients that differ from the global batch's gradients only by rounding
    # parameters that the loss of the shards reaches but not the loss of the global batch, or vice versa
    other_parameters: tuple[str, ...] = ()
    error: str = ""  # why the shards could not be run, or the result could not be explained further
    numbers: RandomNumbers = "drawn"  # random numbers of the shards, as in `SingleStep`
    # of the global batch's gradient, with batch statistics per shard, to the ranks' average; measured if the shards
    # do not reproduce the ranks' average
    by_statistics: Fit = Fit()

    @property
    def is_all_normalisation(self) -> bool:
        """True if wrongly weighted loss terms (sums, means) explain the whole difference."""
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
    float64_error: str  # why there is no float64 run; "" if there is one
    backwards: int = 1  # backward passes of the user in the step, plus the last one
    numbers: RandomNumbers = "drawn"  # random numbers of the step (see `RandomNumbers`)
