"""Sums that go into the next sum over the ranks, judged on evidence: faults and twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.report import Location
from ddpcheck.rules.evaluation.ddp806_sum_reduced_again import judge_repeated_sums
from ddpcheck.trace.evaluations import Evaluations

LINE = Location("train.py", 30)


def calls(*own: Sequence[float], carried: float = 1.0) -> list[list[SumsReduced]]:
    """Of ranks that give numbers of their own in each call, and so much of the sum before."""
    given: list[list[float]] = [[] for _ in own]
    left: list[float] = []
    for numbers in zip(*own, strict=True):
        before = carried * left[-1] if left else 0.0
        for of_rank, number in zip(given, numbers, strict=True):
            of_rank.append(before + number)
        left.append(sum(of_rank[-1] for of_rank in given))
    sums = tuple((number,) for number in left)
    return [[SumsReduced(LINE, tuple((number,) for number in of_rank), sums)] for of_rank in given]


@pytest.mark.parametrize(
    ("reduced", "is_found"),
    [
        (calls([1.0, 2.0, 1.5, 1.0], [2.0, 1.0, 1.5, 3.0]), True),
        (calls([1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0], carried=0.0), False),  # numbers that double
        (calls([1.0, 3.0, 20.0, 100.0], [1.0, 3.0, 20.0, 100.0], carried=0.0), False),
        (calls([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]), False),
    ],
)
def test_sums_that_are_reduced_again(reduced: list[list[SumsReduced]], is_found: bool) -> None:
    found = judge_repeated_sums(Evaluations(sums=reduced))
    assert [(one.code, one.location) for one in found] == ([("DDP806", LINE)] if is_found else [])
    assert not judge_repeated_sums(Evaluations(sums=[reduced[0], []]))  # another rank has no such line
