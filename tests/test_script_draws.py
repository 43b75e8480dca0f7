"""DDP510 in the training step, judged on evidence: what ranks draw alike, and may or may not draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.findings.evidence.draws import StepDraw
from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.report import Location
from ddpcheck.judge.script_draws import judge_step_draws, line_of_selection

FORWARD, DRAW, SEED = (Location("train.py", line) for line in (30, 20, 3))
Given = list[list[Inputs]]


def given(*, level: bool = False, alike: bool = False) -> Given:
    """What two ranks gave a wrapper in three steps: 4 samples of 8 numbers each, and perhaps a number for each."""

    def of_rank(rank: int) -> list[Inputs]:
        own = 0 if alike else 100 * rank
        return [
            Inputs(
                0,
                s,
                tuple(range(own + 10 * s, own + 10 * s + 4)),
                FORWARD,
                ((own + s, 32), *([(s, 4)] if level else [])),
            )
            for s in range(3)
        ]

    return [of_rank(0), of_rank(1)]


def drawn(count: int, kind: str = "noise", *, own: bool = False, **more: Any) -> list[list[StepDraw]]:
    """Two ranks that draw in three steps: from the same state, or each from a state of its `own`."""
    plain = [StepDraw(s, "torch", kind, count, s, s + 1, location=DRAW, seeded=SEED) for s in range(1, 4)]
    of_rank = [replace(one, **more) for one in plain]
    return [of_rank, [replace(one, before=one.before + 50 * own) for one in of_rank]]


@pytest.mark.parametrize(
    ("draws", "inputs", "found"),
    [
        (drawn(32), given(), True),  # as many as forward is given
        (drawn(4), given(), True),  # as there are samples
        (drawn(32, own=True), given(), False),
        (drawn(64), given(), False),  # for the batch of all ranks
        (drawn(1), given(), False),  # for a batch
        (drawn(4, "choice"), given(), False),  # of samples, from a shard
        (drawn(4, "choice"), given(level=True), True),
        (drawn(4, "any", generator="numpy", location=None), given(level=True), True),
        (drawn(4, "choice", in_forward=True), given(), True),  # steps of a diffusion
        (drawn(32, in_forward=True), given(), False),  # dropout, made by hand
        (drawn(32), given(alike=True), False),  # DDP505
        ([drawn(32)[0][:1], drawn(32)[1][:1]], given(), False),  # once
        (drawn(32, generator=""), given(), False),  # a generator of its own
    ],
)
def test_numbers_that_ranks_draw_for_their_samples(
    draws: Sequence[Sequence[StepDraw]], inputs: Given, found: bool
) -> None:
    findings = judge_step_draws(draws, inputs)
    assert [finding.code for finding in findings] == ["DDP510"] * found
    assert all(finding.location in (SEED, DRAW) for finding in findings)


def test_noise_alone_beside_other_samples_of_a_loader() -> None:
    assert judge_step_draws(drawn(32), given(alike=True), loads_others=True)


def test_the_line_by_which_samples_are_drawn() -> None:
    assert line_of_selection(drawn(4, "choice")) == SEED
    assert line_of_selection(drawn(4, "choice", generator="", seeded=None)) == DRAW
    assert line_of_selection(drawn(4, "choice", own=True)) is None
