"""Evidence on each parameter's part in the loss.

Judged in `judge.parameters`; gathered in `gather.phases.local_step` and `gather.autograd`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct, field

from ddpcheck.findings.figures import ParameterPath, PathStep
from ddpcheck.findings.from_json import added
from ddpcheck.findings.report import Location

GradientState = Literal["contributes", "zero", "missing", "lost"]
"""`missing`: backward does not reach the parameter. `lost`: it does, and no gradient arrived."""


@dataclass(frozen=True, slots=True)
class PathEnd:
    """Why a parameter does not contribute to the loss.

    Attributes:
        cause: `unused` (no operation reads it), `unreachable` (what it made does not reach the loss), `cut` (the
            loss's value depends on it, and something took the path out of autograd), `lost` (backward returned None
            on the way to it), `zero` (an operation on the way turns every gradient into zeros), or `unknown`.
        reason: What cut the path ("detach()", "torch.no_grad()", "argmax(), which is not differentiable"), or the last
            operation on it.
        location: The line of the user's code at which that happened.
        module: The module whose forward was running there, empty at the top.
        no_grad_location: The line that switched gradients off, where that is what cut the path.
        steps: The operations from the parameter to there, the last of them the one that cut the path, or the last on
            it; where there are many, the first and the last. Not compared: it is how one came there.
        left_out: How many operations are not among them.
    """

    cause: str
    reason: str = ""
    location: Location | None = None
    module: str = ""
    no_grad_location: Location | None = None
    steps: tuple[PathStep, ...] = added((), compare=False)
    left_out: int = added(0, compare=False)

    def path_of(self, parameter: str) -> ParameterPath | None:
        """What a report draws of it; None where the operations are not known."""
        if self.cause == "unused":
            return ParameterPath(parameter, "unused")
        if self.cause == "cut" and self.steps:
            begins_at = self.no_grad_location if self.no_grad_location != self.location else None
            return ParameterPath(parameter, "cut", self.steps, self.left_out, self.reason, begins_at)
        if self.cause == "unreachable" and self.steps:
            return ParameterPath(parameter, "unreachable", self.steps, self.left_out)
        if self.cause in ("zero", "lost") and self.reason:
            end: Literal["zero", "lost"] = "zero" if self.cause == "zero" else "lost"
            return ParameterPath(parameter, end, (PathStep(self.reason, self.module, self.location),))
        return None

    @property
    def at(self) -> str:
        """The line in words, where it is known."""
        return f" at {self.location}" if self.location else ""


class UnregisteredTensor(Struct, frozen=True):
    """A leaf that receives gradient and is no parameter of the module that was wrapped.

    Attributes:
        name: The path to it from the module, or the name of a variable.
        shape: Of the tensor.
        location: The line that assigns it.
        created_in_forward: It is a parameter of the module by now, but the forward pass made it, after DDP had looked.
        kind: Of what holds it, in words ("global variable"), where that is not the module.
    """

    name: str
    shape: tuple[int, ...]
    location: Location | None = None
    created_in_forward: bool = False
    kind: str = ""


class ParameterChange(Struct, frozen=True):
    """A change that the forward pass has made to a parameter that DDP knows.

    Attributes:
        kind: "replaced", "removed", "frozen", "unfrozen" or "cast or moved".
        location: The line that did it.
        replacement: The parameter that DDP knows, too, and that stands in its place now; empty for a new one.
    """

    kind: str
    location: Location | None = None
    replacement: str = ""


class StepEvidence(Struct, frozen=True):
    """One rank's parameters in one step: which of them contribute to the loss.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        states: By name, for every parameter that requires grad.
        path_ends: Why, for those that are missing or lost.
        unregistered: Leaves that receive gradient and are no parameters.
        arrivals: How often a gradient arrived, for parameters where that was more than once.
        hidden_from_ddp: Parameters that contribute, but that DDP cannot find from what `forward` returned.
        output_type: The class of what `forward` returned where DDP finds no tensor in it, else empty.
        reentrant: Whether a re-entrant checkpoint stood in the graph.
        changed: The parameters that this forward pass, or one before it, has changed.
    """

    rank: int
    step: int
    states: Mapping[str, GradientState]
    path_ends: Mapping[str, PathEnd] = field(default_factory=dict)
    unregistered: tuple[UnregisteredTensor, ...] = ()
    arrivals: Mapping[str, int] = field(default_factory=dict)
    hidden_from_ddp: tuple[str, ...] = ()
    output_type: str = ""
    reentrant: bool = False
    changed: Mapping[str, ParameterChange] = field(default_factory=dict)
