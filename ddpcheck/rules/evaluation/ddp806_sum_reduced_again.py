"""DDP806 sum-reduced-again: warning, keeps_gradients

A running sum is all_reduced after each batch, and the reduced sum is used in the next one.

Why: all_reduce leaves the sum of all ranks on each rank. If a rank adds to this sum and reduces it again, the sums of
    earlier batches are multiplied by the number of ranks. This happens with each batch, so the first batches have
    almost all of the weight.
Fix: Reduce once, after the loop; or reduce the part since the last time, and add that to the total.
Detected: `ddpcheck run` compares what each rank gives to an all_reduce with the previous result at the same line.
    DDP806 is reported if each rank gives the previous result plus a new part of about the same size, four times in a
    row. Only the first 64 calls at a line, with up to eight numbers each, are covered.
Ignore: If the number grows this way on purpose.
Checks: run evaluation
Example:
    for x, y in batches:
        total += loss(ddp(x), y).detach()
        dist.all_reduce(total)               # right: after the loop
"""

from __future__ import annotations

from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import one_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluations import Evaluations

_MIN_EQUAL = 4.0  # largest ratio between the amounts of two batches


def repeated_sum_finding(sums: SumsReduced, world_size: int) -> list[Finding]:
    text = ", ".join(f"{result[0]:.6g}" for result in sums.left)
    return one_finding(
        "DDP806",
        ("all_reduce",),
        "The result of all_reduce goes into the next all_reduce at the same line, which multiplies the sums of earlier "
        f"batches by {world_size} each time.",
        location=sums.location,
        evidence=[f"the sums were {text}", f"before the second all_reduce, this rank had {sums.given[1][0]:.6g}"],
    )


@rule
def judge_sums_again(evaluations: Evaluations) -> list[Finding]:
    """DDP806: all_reduce of an earlier all_reduce result; one finding per line.

    Each rank adds about the same amount since the last sum, while the sums grow by the world size or more: numbers that
    merely grow do not do both.
    """
    reduced = evaluations.sums
    world_size, findings = len(reduced), []
    for first in reduced[0] if reduced else ():
        at_line = [sums for rank_sums in reduced for sums in rank_sums if sums.location == first.location]
        if len(at_line) == world_size and all(sums.left == first.left for sums in at_line):
            if any(all(_is_added(sums, number) for sums in at_line) for number in range(len(first.left[0]))):
                findings += repeated_sum_finding(first, world_size)
    return findings


def _is_added(sums: SumsReduced, number: int) -> bool:
    """Return True if each call adds a similar amount to the previous sum."""
    added = [inputs[number] - result[number] for inputs, result in zip(sums.given[1:], sums.left, strict=False)]
    return min(sums.left[0][number], *added) > 0 and max(added) <= _MIN_EQUAL * min(added)
