"""DDP510 in the training step, judged on evidence: what ranks draw alike, and may or may not draw alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.evidence.script import EvaluationInputs, Inputs, LossDifferentiated, LossTarget
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.record.data.datasets import copied_samples, noise_sketch
from ddpcheck.rules.data.ddp505_duplicate_data import judge_delayed_samples, judge_same_targets, judge_streams
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import _cosine, judge_added_noise, judge_step_draws
from ddpcheck.trace.data import line_of_selection
from tests.reports import assert_says, only

FORWARD, DRAW, SEED = (Location("train.py", line) for line in (30, 20, 3))
Given = list[list[Inputs]]


def given(*, level: bool = False, alike: bool = False) -> Given:
    """What two ranks gave a wrapper in three steps: 4 samples of 8 numbers each, and perhaps a number for each."""

    def step(own: int, count: int) -> Inputs:
        samples, levels = tuple(range(own + 10 * count, own + 10 * count + 4)), [(count, 4)] if level else []
        return Inputs(0, count, samples, FORWARD, ((own + count, 32), *levels))

    return [[step(0 if alike else 100 * rank, count) for count in range(3)] for rank in range(2)]


def drawn(count: int, kind: str = "noise", *, own: bool = False, **more: Any) -> list[list[StepDraw]]:
    """Two ranks that draw in three steps: from the same state, or each from a state of its `own`."""
    plain = [StepDraw(s, "torch", kind, count, s, s + 1, location=DRAW, seeded_at=SEED) for s in range(1, 4)]
    of_rank = [replace(one, **more) for one in plain]
    return [of_rank, [replace(one, before=one.before + 50 * own) for one in of_rank]]


@pytest.mark.parametrize(
    ("draws", "inputs", "code"),
    [
        (drawn(32), given(), "DDP510"),  # as many as forward is given
        (drawn(4), given(), "DDP510"),  # as there are samples
        (drawn(32, own=True), given(), ""),
        (drawn(1), given(), ""),  # for a batch
        (drawn(4, "any", generator="numpy", location=None), given(level=True), "DDP510"),
        (drawn(4, "choice", in_forward=True), given(), "DDP510"),  # steps of a diffusion
        (drawn(32, in_forward=True), given(), ""),  # dropout, made by hand
        (drawn(32), given(alike=True), ""),  # DDP505
        ([drawn(32)[0][:1], drawn(32)[1][:1]], given(), ""),  # once
        (drawn(32, generator=""), given(), ""),  # a generator of its own
        (drawn(64), given(), ""),  # for the batch of all ranks
        (drawn(4, "choice"), given(), ""),  # of samples, from a shard
    ],
)
def test_numbers_that_ranks_draw_for_their_samples(draws: Any, inputs: Given, code: str) -> None:
    findings = judge_step_draws(draws, inputs)
    assert_says(findings, code)
    assert all(finding.location in (SEED, DRAW) for finding in findings)
    assert judge_step_draws(drawn(32), given(alike=True), loads_others=True)


def test_the_line_by_which_samples_are_drawn() -> None:
    assert line_of_selection(drawn(4, "choice")) == SEED
    assert line_of_selection(drawn(4, "choice", generator="", seeded_at=None)) == DRAW
    assert line_of_selection(drawn(4, "choice", own=True)) is None
    data = [replace(one, step=0, location=SEED) for one in drawn(4, generator="", seeded_at=None)[0][:1]]
    once = [[*data, *of_rank] for of_rank in drawn(4, "choice", generator="", seeded_at=None)]
    assert line_of_selection(once) == DRAW  # the data were drawn before, from an own generator, too


def added(*of_steps: Sequence[Sequence[float]], alike: bool = False) -> Given:
    """What two ranks gave in steps, in each of which they had added something to the samples of a loader."""
    inputs = given(alike=alike)
    return [
        [replace(one, noise=tuple(of_ranks[rank])) for one, of_ranks in zip(of_rank, of_steps, strict=False)]
        for rank, of_rank in enumerate(inputs)
    ]


A, B, C, D = (1.0, 0.1, 0.0, 0.0), (0.0, 1.0, 0.1, 0.0), (0.0, 0.0, 1.0, 0.1), (0.1, 0.0, 0.0, 1.0)


def test_noise_that_every_rank_adds_to_samples_of_its_own() -> None:
    at_line = [[StepDraw(1, "", "any", 0, 0, 0, location=DRAW)]] * 2
    for draws, location in (([[], []], FORWARD), (at_line, DRAW)):
        assert_says(judge_added_noise(draws, added((A, A), (B, B), (C, C))), f"DDP510 ... at {location}")
    assert not judge_added_noise([[], []], added((A, B), (B, C), (C, D)))  # noise of its own
    assert not judge_added_noise([[], []], added((A, A), (A, A), (A, A)))  # made of the samples, or a constant
    assert not judge_added_noise([[], []], added((A, A), (B, B), ((), ())))  # known in two steps only
    assert not judge_added_noise([[], []], added((A, A), (B, B), (C, C), alike=True))  # DDP505


def test_what_is_added_to_samples_is_known_past_scales_and_offsets() -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(8, 32, generator=generator) for _ in range(2))
    kept = copied_samples([x, torch.zeros(8), torch.arange(8)])
    assert len(kept) == 1 and kept[0] is not x
    assert not noise_sketch(kept, [x.clone()]) and not noise_sketch(kept, [2 * x - 1])
    assert not noise_sketch(kept, [x[:4]]) and not noise_sketch([], [x])
    plain, scaled = noise_sketch(kept, [x + noise]), noise_sketch(kept, [3 * x + 0.5 * noise + 1])
    assert _cosine(plain, scaled) > 0.99
    other = torch.randn(8, 32, generator=generator)
    assert abs(_cosine(plain, noise_sketch(kept, [x + other]))) < 0.5
    assert (
        abs(_cosine(noise_sketch(kept, [x + noise[:1]]), noise_sketch([other], [other + noise[:1]]))) < 0.5
    )  # for all alike


# Samples that another rank has drawn before


def streams(*, choice: str = "choice", order: tuple[int, ...] = (0, 1, 2), own: bool = False) -> list[Any]:
    """Rank 0 has evaluated on what rank 1 trains on, in an `order`; both draw from one state, or from their `own`."""
    inputs = given()
    evaluated = [EvaluationInputs(0, 0, inputs[1][step].samples) for step in order]
    return [dict(enumerate(drawn(4, choice, own=own))), dict(enumerate(inputs)), {0: evaluated, 1: []}]


def test_what_one_rank_trains_on_another_has_drawn_before() -> None:
    assert_says(judge_streams(*streams()), f"DDP505 ... of ranks (1,) at {SEED} ... steps 0 to 2")
    draws, inputs, evaluated = streams(choice="any")
    # Of numpy's generator it is known what it was when an interval began, and that one rank has drawn more since.
    draws[0] = [replace(draw, after=draw.after + 7) for draw in draws[0]]
    assert_says(judge_streams(draws, inputs, evaluated), f"at {SEED}")


def test_what_is_evaluated_may_be_trained_on_by_another_rank() -> None:
    assert not judge_streams(*streams(own=True))  # the evaluation goes through the training data in the order of a rank
    assert not judge_streams(*streams(choice="noise"))
    assert not judge_streams(*streams(order=(0, 2, 1)))
    assert not judge_streams(*streams(order=(0, 1)))  # too few to tell
    draws, _, evaluated = streams()
    assert not judge_streams(draws, dict(enumerate(given(alike=True))), evaluated)  # told of that alone


def test_ranks_that_follow_each_other() -> None:
    def judged(batch: Callable[[int, int], int]) -> list[Finding]:
        steps = (0, 1, 2, 4, 8)
        return judge_delayed_samples({r: [Inputs(0, n, (batch(r, n), -1), FORWARD) for n in steps] for r in range(2)})

    assert_says(judged(lambda rank, step: rank + step), f"DDP505 ... at {FORWARD}")  # a stride that counts no ranks
    assert not judged(lambda rank, step: 2 * step + rank)
    assert not judged(lambda rank, step: (rank + step) % 2)  # the ranks take turns


def targets(*of_steps: int, rows: int = 4, elements: int = 4, bits: float = 8.0, wrapped: bool = True) -> Any:
    """The losses of a rank in some steps, by the fingerprint of the targets of each."""
    made = [(LossTarget(digest, rows, elements, bits),) for digest in of_steps]
    return [LossDifferentiated(n, 0, (), LOSS, wrappers=(0,) * wrapped, targets=t) for n, t in enumerate(made)]


LOSS = Location("train.py", 31)
SAME = targets(7, 8, 9)


@pytest.mark.parametrize(
    ("losses", "inputs", "is_wrong"),
    [
        ([SAME, SAME], given(), True),
        ([SAME, targets(7, 8, 1)], given(), False),  # not in each step
        ([SAME, SAME], given(alike=True), False),  # then the inputs say it
        ([targets(7, 7, 7)] * 2, given(), False),  # places in the batch, or real and false
        ([targets(7, 8)] * 2, given(), False),
        ([targets(7, 8, 9, bits=0.0)] * 2, given(), False),  # in order of their classes, which ranks may choose alike
        ([targets(7, 8, 9, rows=8, elements=8)] * 2, given(), False),  # of both ranks together
        ([targets(7, 8, 9, rows=32, elements=32)] * 2, given(), True),  # a token for each that forward is given
        ([targets(7, 8, 9, wrapped=False)] * 2, given(), False),
        ([targets(7, 8, 9, bits=2.0)] * 2, given(), False),  # so by chance
        ([SAME, [replace(loss, targets=()) for loss in SAME]], given(), False),
    ],
)
def test_targets_that_are_the_same_on_every_rank(losses: Any, inputs: Given, is_wrong: bool) -> None:
    assert_says(judge_same_targets(losses, inputs, [[], []]), f"DDP505 warning ... at {LOSS}" if is_wrong else "")


def test_targets_of_the_shape_of_the_inputs_may_be_noise_and_the_line_that_chooses_the_samples_comes_first() -> None:
    for losses, may_be_noise in (([SAME, SAME], False), ([targets(7, 8, 9, elements=32)] * 2, True)):
        assert ("noise" in only(judge_same_targets(losses, given(), [[], []])).message) is may_be_noise
    assert_says(judge_same_targets([SAME, SAME], given(), drawn(64, "choice")), f"at {SEED}")


def test_samples_beside_the_state_of_a_recurrent_network() -> None:
    tokens = targets(7, 8, 9, 7, rows=40, elements=40)  # the first batch again, in another epoch
    tokens += [
        replace(loss, step=4) for loss in targets(6, rows=16, elements=16)
    ]  # a shorter one, the last of an epoch
    each_its_own = [tokens, targets(4, 5, 6, 4, 5, rows=40, elements=40)]
    for scale in (1, 0):  # the hidden state is zeros in the first step on every rank; then the inputs say it
        states = [[scale * rank * step for step in range(4)] for rank in range(2)]
        inputs = [
            [Inputs(0, s, (s % 3, own), FORWARD, ((s % 3, 40), (own, 64))) for s, own in enumerate(of_rank)]
            for of_rank in states
        ]
        findings = judge_same_targets([tokens, tokens], inputs, [[], []])
        assert_says(findings, "also the same on each rank" if scale else "")
        assert not judge_same_targets(each_its_own, inputs, [[], []])
