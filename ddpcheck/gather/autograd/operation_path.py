"""The operations between a parameter and what was made of it, of which a report draws the first and the last."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.figures import PathStep
from ddpcheck.findings.replace import replace

_MOST_STEPS = 4  # at each end of a path


@dataclass(slots=True)
class OperationPath:
    """The operations from a suspect to a tensor: how many, the first and the last of them."""

    length: int = 0
    first: tuple[PathEnd, ...] = ()
    last: tuple[PathEnd, ...] = ()

    def to(self, use: PathEnd) -> OperationPath:
        """The path that goes on with `use`."""
        first = (*self.first, use) if self.length < _MOST_STEPS else self.first
        return OperationPath(self.length + 1, first, (*self.last, use)[-_MOST_STEPS:])

    def told_in(self, end: PathEnd) -> PathEnd:
        """`end` with these operations."""
        more = min(self.length - len(self.first), _MOST_STEPS)
        both = (*self.first, *self.last[len(self.last) - more :])
        steps = tuple(PathStep(one.reason, one.module, one.location) for one in both)
        return replace(end, steps=steps, left_out=self.length - len(steps))
