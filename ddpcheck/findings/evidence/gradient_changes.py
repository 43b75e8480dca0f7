"""Evidence on gradients between the backward passes of one optimizer step, and on whose they are.

Judged in `judge.loop.script_optimizers` and `judge.gradients.script_alone`; gathered in
`record.optimizers.clip_recorder` and `record.loop.taken_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.report import Location


class GradientsChanged(Struct, frozen=True):
    """Gradients were changed after a backward pass, and another one has added to them then.

    Attributes:
        wrapper: The number of the wrapper.
        step: How often optimizers had stepped before.
        by: The function that clips, if one has been called; else "".
        factor: The norm of all gradients of the wrapper after it, in parts of the norm before.
        location: The line of the call, else that of the next backward pass.
        put_off: Whether they were this rank's own, and are to be reduced with those of a later backward pass.
    """

    wrapper: int
    step: int
    by: str
    factor: float
    location: Location | None
    put_off: bool


class GradientsTaken(Struct, frozen=True):
    """The script has gradients of wrapped parameters from `torch.autograd.grad`, which no hook of DDP sees.

    Attributes:
        wrapper: The number of the wrapper.
        count: How often it had been called for these before.
        location: The line of the call.
        reductions: How many averaged backward passes of the wrapper had ended.
        put_off: Whether the wrapper holds gradients of a backward pass that was not averaged.
        gradients: A sketch of each that it has given; empty at the end of the script.
        parameters: Fingerprints of parameters of the wrapper.
        marks: Fingerprints of a small one at each call since the last entry.
    """

    wrapper: int
    count: int
    location: Location | None
    reductions: int = 0
    put_off: bool = False
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    marks: tuple[int, ...] = ()
