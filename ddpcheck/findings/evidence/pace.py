"""Evidence on the pace of a loop: what comes between the reductions of a wrapper, and gradients that are used again.

Judged in `judge.loop.script_pace`; gathered in `record.loop.pace_recorder` and
`record.optimizers.zeroing_recorder`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.report import Location


class PaceRun(Struct, frozen=True):
    """From a reduction on, the same happens before each of them, until the next entry of the wrapper.

    Attributes:
        wrapper: The number of the wrapper.
        first: The number of the reduction.
        forwards: Forward passes of the wrapper in training mode, with gradients, since the one before.
        batches: That the script has taken from the loader that it goes through; 0 without a loader.
        location: The line of the script that leaves out the rest of a turn of the loop, if there is one only, else that
            of the backward pass.
    """

    wrapper: int
    first: int
    forwards: int
    batches: int
    location: Location | None


class WrapperPace(Struct, frozen=True):
    """All reductions of a wrapper on one rank, and how many there were."""

    runs: tuple[PaceRun, ...]
    reductions: int

    def lengths(self) -> list[tuple[PaceRun, int]]:
        """Each run, with the number of its reductions."""
        ends = [*(run.first for run in self.runs[1:]), self.reductions]
        return [(run, end - run.first) for run, end in zip(self.runs, ends, strict=True)]


class GradientsLeft(Struct, frozen=True):
    """Step after step, an optimizer uses gradients that were there before another step, and were never zeroed.

    Attributes:
        optimizer: Its number.
        own: Whether the optimizer itself had used them before; else another one has, the loss of which has left them.
        made: The line of the backward pass that has left them.
        added: The line of the one that has added to them.
        location: The line of the step.
    """

    optimizer: int
    own: bool
    made: Location | None
    added: Location | None
    location: Location | None
