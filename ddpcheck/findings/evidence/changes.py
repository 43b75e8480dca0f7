"""Evidence on what a script changes: wrapped modules, and learning rates; with the lines.

Judged in `judge.replicas.script_changes` and `judge.loop.script_optimizers`; gathered in
`record.rank.line_recorder`, `record.replicas.write_recorder` and `record.optimizers.schedule_recorder`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.report import Location

OF_A_COPY = -1  # of a wrapped module, as a variable holds it


class ModuleChanged(Struct, frozen=True):
    """A line of the script has changed, or may have changed, parameters or buffers of a wrapped module.

    Attributes:
        wrapper: The number of the wrapper; `OF_A_COPY` for one, which `names` names.
        what: "values" (loaded, or set by a function that was applied), "written" (in place, or as `.data`, outside of
            an optimizer's step), "buffer" (one has another value), "requires_grad", "parameters" (others are
            registered now), "mode" (to evaluation), "scale" (what a reduction divides
            by), "ignored" (`.data` of a shard was assigned, which has left it as it was), or "replaced" (a parameter
            was assigned in the place of a shard, and is none that `fully_shard` gathers).
        how: The name of what was called, or assigned.
        names: Of the parameters; empty where they are not known. Of the submodule, where its mode is changed.
        location: The line of the script.
        forwards: How many forward passes of the wrapper had been before.
        step: How many averaged backward passes had ended before.
    """

    wrapper: int
    what: str
    how: str
    names: tuple[str, ...]
    location: Location | None
    forwards: int = 0
    step: int = 0


class ScheduleState(Struct, frozen=True):
    """The learning rate schedule of an optimizer.

    Attributes:
        made: The line that has constructed it.
        steps: How often it has stepped.
        location: The line that has stepped it first.
        by_package: Whether an installed package has, and not the script itself.
        turns: How many of these steps were the first one after a backward pass or an optimizer's step.
        ends: After which of them the rate has not changed any more, and after which it was the lowest.
        by_world: Whether the loop around the steps has one for each rank by its source, and what constructs the
            schedule takes nothing from the world size.
        numbers: That it and its functions hold.
    """

    made: Location | None
    steps: int = 0
    location: Location | None = None
    by_package: bool = False
    turns: int = 0
    ends: tuple[int, int] = (0, 0)
    by_world: bool = False
    numbers: tuple[float, ...] = ()
