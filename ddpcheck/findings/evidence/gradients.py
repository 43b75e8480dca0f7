"""Evidence on differences between gradients.

Judged in `judge.gradients.reducer` and `judge.gradients.single_process`; gathered in `gather.steps.gradient_distance`
and `gather.phases.repeated_step`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.evidence.modules import GradientHook


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
