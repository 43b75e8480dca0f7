"""DDP806 sum-reduced-again: warning

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
