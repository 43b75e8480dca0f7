"""Micro-batches and what comes between them: clips, sums of means, judged on evidence; a fault and its twins each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddpcheck.findings.evidence.gradient_changes import GradientsChanged
from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Location
from ddpcheck.findings.severity import Severity
from ddpcheck.judge.script_losses import judge_accumulated
from ddpcheck.judge.script_optimizers import judge_changed

BACKWARD, OTHER, CLIPS, MADE = (Location("train.py", line) for line in (30, 31, 32, 28))


def passes(
    weight: float,
    *,
    batches: Sequence[int] = (0, 0, 0, 0),
    kind: str = "mean",
    put_off: bool = True,
    again: bool = True,
) -> list[LossDifferentiated]:
    found = []
    for step in (0, 1, 2):
        for number, taken in enumerate(batches):
            last = number == len(batches) - 1
            one = LossDifferentiated(step, number, (ScaledTerm(kind, weight, 4),), BACKWARD, MADE, batches=taken)
            one = replace(one, wrappers=(0,)) if last or not put_off else replace(one, put_off=(0,))
            found.append(one if again or last else replace(one, location=OTHER))
    return found


@pytest.mark.parametrize(
    ("of_rank", "found"),
    [
        (passes(1.0), ["DDP514"]),
        (passes(0.25), []),
        (passes(1.0, batches=(1, 2, 3, 4)), ["DDP514"]),
        (passes(1.0, batches=(1, 2, 3, 4), put_off=False), ["DDP514"]),  # each micro-batch is averaged
        (passes(1.0, batches=(1, 1, 1, 1)), []),  # tasks of one batch, whose losses are added up
        (passes(1.0, put_off=False), []),  # losses one after the other; nobody says that these are micro-batches
        (passes(1.0, again=False), []),  # a loss on real samples, and one on made ones
        (passes(1.0, kind="sum"), []),
        (passes(1.0, batches=(1,)), []),
    ],
)
def test_means_over_micro_batches_that_are_added_up(of_rank: list[LossDifferentiated], found: list[str]) -> None:
    findings = judge_accumulated([of_rank, of_rank])
    assert [one.code for one in findings] == found
    assert all(one.location == MADE for one in findings)


def changed(*factors: float, by: str = "", put_off: bool = True) -> list[GradientsChanged]:
    where = CLIPS if by else BACKWARD
    return [GradientsChanged(0, step, by, factor, where, put_off) for step, factor in enumerate(factors)]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([changed(0.2, 0.3, by="clip_grad_norm_"), changed(0.5, 0.1, by="clip_grad_norm_")], [Severity.ERROR]),
        ([changed(0.2, 0.3), changed(0.5, 0.1)], [Severity.ERROR]),  # by hand
        ([changed(0.5, 0.5), changed(0.5, 0.5)], []),  # by one factor
        ([changed(0.2, by="clip_grad_norm_"), changed(0.5, by="clip_grad_norm_")], []),  # once
        ([changed(0.2, 0.3, by="clip_grad_norm_", put_off=False)] * 2, [Severity.WARNING]),
        ([changed(0.2, 0.3, put_off=False)] * 2, []),
    ],
)
def test_gradients_that_are_changed_after_each_micro_batch(
    ranks: list[list[GradientsChanged]], found: list[Severity]
) -> None:
    assert [one.severity for one in judge_changed(ranks)] == found
