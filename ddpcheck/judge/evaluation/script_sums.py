"""DDP806: sums over the ranks that go into the next sum, in which they are counted once a rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import one_finding

_ALIKE = 4.0  # times as much as another one, that what comes from batch to batch may be


def judge_sums_again(reduced: Sequence[Sequence[SumsReduced]]) -> list[Finding]:
    """At most one finding a line; `reduced` by rank.

    What each rank has added since the last sum is about as much each time, while the sums themselves grow by the number
    of ranks and more: numbers that merely grow would not do both.
    """
    world_size, found = len(reduced), []
    for first in reduced[0]:
        others = [one for of_rank in reduced for one in of_rank if one.location == first.location]
        if len(others) == world_size and all(one.left == first.left for one in others):
            if any(all(_is_added(one, number) for one in others) for number in range(len(first.left[0]))):
                found += _told(first, world_size)
    return found


def _is_added(one: SumsReduced, number: int) -> bool:
    """Whether a rank gives the sum before and about as much again each time, of one number."""
    added = [given[number] - left[number] for given, left in zip(one.given[1:], one.left, strict=False)]
    return min(one.left[0][number], *added) > 0 and max(added) <= _ALIKE * min(added)


def _told(one: SumsReduced, world_size: int) -> list[Finding]:
    sums = ", ".join(f"{left[0]:.6g}" for left in one.left)
    return one_finding(
        "DDP806",
        ("all_reduce",),
        "What all_reduce has left goes into the next all_reduce at the same line: sums of earlier batches are counted "
        f"{world_size} times each time.",
        location=one.location,
        evidence=[f"the sums were {sums}", f"before the second one, this rank had {one.given[1][0]:.6g}"],
    )
