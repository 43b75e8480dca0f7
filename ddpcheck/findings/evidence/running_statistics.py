"""Evidence on running statistics of a rank's samples by which the inputs of a wrapped module are normalised.

Judged in `judge.replicas.script_statistics`; gathered in `record.replicas.statistics_recorder`.
"""

from __future__ import annotations

from msgspec import Struct

from ddpcheck.findings.report import Location


class RunningStatistic(Struct, frozen=True):
    """What the program holds outside of wrapped modules, when forward is called: a running mean, or a running scale.

    Attributes:
        wrapper: The number of the wrapper.
        forward: How often its module had been called before.
        name: The variable.
        values: Some of its elements.
        scale: By what these elements of the inputs are divided; 1 where that is not known.
        equations: By how many equations it has been found that it has just moved towards the mean of the samples that
            this rank gives to forward, and that these are normalised by it; 0 where it has not been found this time.
        location: The line that updates it.
        exchanged: How often it has been handed to a collective by now.
    """

    wrapper: int
    forward: int
    name: str
    values: tuple[float, ...]
    scale: tuple[float, ...]
    equations: int
    location: Location | None
    exchanged: int = 0
