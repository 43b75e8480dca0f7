"""Evidence on gradients between the backward passes of one optimizer step, and on whose they are.

Judged in `judge.script_gradients`; gathered in `monitor.script.recording.clip_recorder` and `.leftover_recorder`.

This module is light: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.findings.report import Location


@dataclass(frozen=True, slots=True)
class GradientsChanged:
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
