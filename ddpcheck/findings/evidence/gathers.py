"""Evidence on what a script gathers from all ranks and puts into its loss, as each rank saw it.

Judged in `judge.gradients.script_gathers`; gathered in `record.loss.gather_recorder`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.report import Location


class GatheredConstant(Struct, frozen=True):
    """A loss multiplies by the gathered rows of all ranks as by a constant, the rank's own among them.

    Attributes:
        step: How often optimizers had stepped before.
        operation: The collective, whose input carries a gradient.
        location: The line of the script that calls it.
        rows: Of all ranks.
    """

    step: int
    operation: str
    location: Location | None
    rows: int


class OwnPartPutBack(Struct, frozen=True):
    """A loss is made of what was gathered without gradient, and the rank's own part of it carries one.

    Each rank has the whole loss then, and its own part of the gradient: these add up over the ranks.

    Attributes:
        step: How often optimizers had stepped before.
    """

    step: int
