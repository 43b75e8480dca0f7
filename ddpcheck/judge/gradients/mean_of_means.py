"""The severity of DDP305 for a mean of means, by the size of its effect: one rule for all doors.

A mean over each rank's own elements gives an element of a rank that has fewer of them more weight. Where the counts
differ by chance, as with sequences of about one length, no rank is preferred in the long run, and many train so on
purpose: a warning. It is an error where it is large, or where it is always the same rank whose elements count more.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddpcheck.findings.severity import Severity

LEAST_OF_GRADIENT = 0.05
"""How far (relative) a gradient is from that of the global batch in some step where it is an error."""

_TWICE = 2.0  # as much as another does an element count, in half of the steps
_ALWAYS = 1.1  # as much as one of another rank, on average, and more in each step
_FEWEST = 5  # steps, in which one of two ranks is ahead by chance in every sixteenth loop


def severity_of_weights(steps: Sequence[Sequence[float]]) -> Severity:
    """The severity of weights: in each step that was measured, that of an element on each rank, up to a factor."""
    steps = [step for step in steps if step and min(step) > 0]
    if not steps:
        return Severity.WARNING
    if median(max(step) / min(step) for step in steps) >= _TWICE:
        return Severity.ERROR
    parts = [[weight / sum(step) for weight in step] for step in steps]
    average = [sum(of_rank) / len(parts) for of_rank in zip(*parts, strict=True)]
    most, least = average.index(max(average)), average.index(min(average))
    always = len(parts) >= _FEWEST and all(part[most] > part[least] for part in parts)
    return Severity.ERROR if always and average[most] >= _ALWAYS * average[least] else Severity.WARNING
