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
Line: The call of all_reduce.
Checks: run evaluation
Example:
    for x, y in batches:
        total += loss(ddp(x), y).detach()
        dist.all_reduce(total)               # right: after the loop
"""

from __future__ import annotations

from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.evaluations import Evaluations

LARGEST_RATIO = 4.0  # largest ratio between the amounts that two batches add


@rule
def judge_repeated_sums(evaluations: Evaluations) -> list[Finding]:
    """DDP806: all_reduce of an earlier all_reduce result; one finding per line.

    The evidence is that each rank gives the previous result plus a new part, and that all parts are positive and of
    about the same size.
    """
    findings = []
    for first in evaluations.sums[0] if evaluations.sums else ():
        at_line = [sums for rank_sums in evaluations.sums for sums in rank_sums if sums.location == first.location]
        if len(at_line) < len(evaluations.sums) or any(sums.outputs != first.outputs for sums in at_line):
            continue
        if any(all(_adds_to_previous_sum(sums, number) for sums in at_line) for number in range(len(first.outputs[0]))):
            results = ", ".join(f"{result[0]:.6g}" for result in first.outputs)
            findings += new_finding(
                "DDP806",
                ("all_reduce",),
                "The result of all_reduce goes into the next all_reduce at the same line, which multiplies the sums of "
                f"earlier batches by {len(at_line)} each time.",
                location=first.location,
                evidence=[
                    f"the sums were {results}",
                    f"before the second all_reduce, this rank had {first.inputs[1][0]:.6g}",
                ],
            )
    return findings


def _adds_to_previous_sum(sums: SumsReduced, number: int) -> bool:
    """Return True if each call adds a similar amount to the previous sum."""
    added = [inputs[number] - result[number] for inputs, result in zip(sums.inputs[1:], sums.outputs, strict=False)]
    return min(sums.outputs[0][number], *added) > 0 and max(added) <= LARGEST_RATIO * min(added)
