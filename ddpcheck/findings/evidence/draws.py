"""Evidence on the random numbers that a script draws in its training steps, as each rank drew them.

Judged in `judge.data.script_draws`; gathered in `record.data.draw_recorder`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.report import Location


class StepDraw(Struct, frozen=True):
    """A generator has drawn numbers between two optimizer steps: in one call, or in what is not followed call by call.

    Attributes:
        step: How often optimizers had stepped before.
        generator: A global one: "torch", "cuda", "python" or "numpy"; "" for one of the program's own.
        kind: "noise" for real numbers, "choice" for whole ones, "any" where the calls are not known.
        count: At least so many numbers; 0 where that is not known.
        before: A digest of the generator's state; of one of the program's own 0.
        after: The same, after the call.
        in_forward: Whether the forward pass of a wrapper makes the call.
        location: The line of the script.
        seeded: The line that has last seeded the generator.
    """

    step: int
    generator: str
    kind: str
    count: int
    before: int
    after: int
    in_forward: bool = False
    location: Location | None = None
    seeded: Location | None = None
