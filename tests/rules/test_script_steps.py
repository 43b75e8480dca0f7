"""Micro-batches and what comes between them: clips, sums of means, judged on evidence; a fault and its twins each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from ddpcheck.findings.evidence.loop import (
    GradientsChanged,
    GradientsHooked,
    HookedGradient,
    PaceRun,
    StaleGradients,
    WrapperPace,
)
from ddpcheck.findings.evidence.script import LossDifferentiated, OptimizerStep, ScaledTerm
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import Severity
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import judge_hooked, judge_partial_changes
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_shifts
from ddpcheck.rules.gradients.ddp520_leftover_gradients import MIN_STALE_STEPS, judge_stale_gradients
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_scaled_by_hooks
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_params_without_optimizer, judge_unchanged_params
from ddpcheck.rules.registry import judge_view
from ddpcheck.trace.loop import GradientChanges, Loop
from ddpcheck.trace.losses import Losses
from ddpcheck.trace.optimizers import OptimizedParameters
from tests.reports import assert_says

BACKWARD, OTHER, CLIPS, MADE = (Location("train.py", line) for line in (30, 31, 32, 28))


def passes(
    weight: float, *, batches: Sequence[int] = (0,) * 4, kind: str = "mean", put_off: bool = True, again: bool = True
) -> list[LossDifferentiated]:
    later = "late_wrappers" if put_off else "wrappers"
    waits: dict[str, Any] = {later: (0,), "location": BACKWARD if again else OTHER}
    return [
        replace(loss, **(waits if loss.number < len(batches) - 1 else {"wrappers": (0,)}))
        for step in (0, 1, 2)
        for number, taken in enumerate(batches)
        for loss in [LossDifferentiated(step, number, (ScaledTerm(kind, weight, 4),), BACKWARD, MADE, batches=taken)]
    ]


KD = [ScaledTerm("mean", 0.3, 24, multipliers=(0.3,)), ScaledTerm("sum", 0.7 / 8, 80, False, (8.0,), (0.7,))]


def windows(terms: Sequence[ScaledTerm], batches: Sequence[int] = (0, 0, 0)) -> list[LossDifferentiated]:
    return [replace(one, terms=tuple(terms), batches=batches[one.step]) for one in passes(1.0)]


@pytest.mark.parametrize(
    ("of_rank", "found"),
    [
        (passes(1.0), ["DDP514"]),
        (passes(1.0, batches=(1, 2, 3, 4), put_off=False), ["DDP514"]),  # each micro-batch is averaged
        (passes(1.0, batches=(1, 1, 1, 1)), []),  # tasks of one batch, whose losses are added up
        (passes(1.0, again=False), []),  # a loss on real samples, and one on made ones
        (passes(1.0, kind="sum"), []),
        ([replace(one, target_weights=(1.0,)) for one in passes(0.9)], ["DDP514"]),  # of smoothed labels
        ([replace(one, target_weights=(0.25,)) for one in passes(1.0)], []),  # with a penalty of another weight
        (passes(1.0, batches=(1,)), []),
        (windows(KD, batches=(5, 9, 13)), ["DDP514"]),  # a trainer takes all batches of a step before the first pass
        (windows([replace(one, divisors=(4.0, *one.divisors), factor=one.factor / 4) for one in KD]), []),
        (passes(0.25), []),
        (passes(1.0, put_off=False), []),  # losses one after the other; nobody says that these are micro-batches
        (passes(0.25, kind="sum"), ["DDP514"]),  # divided by its four elements by hand
        (windows([replace(one, multipliers=(*one.multipliers, 0.25), factor=one.factor / 4) for one in KD]), []),
    ],
)
def test_means_over_micro_batches_that_are_added_up(of_rank: list[LossDifferentiated], found: list[str]) -> None:
    findings = judge_view(Losses([of_rank, of_rank]))
    assert [(finding.code, finding.location) for finding in findings] == [(code, MADE) for code in found]


def changed(*factors: float, by: str = "", put_off: bool = True) -> list[GradientsChanged]:
    where = CLIPS if by else BACKWARD
    return [GradientsChanged(0, step, by, factor, where, put_off) for step, factor in enumerate(factors)]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([changed(0.5, 0.5), changed(0.5, 0.5)], []),  # by one factor
        ([changed(0.2, 0.3, by="clip_grad_norm_", put_off=False)] * 2, [Severity.WARNING]),
        ([changed(1.00001, 1.0), changed(1.0, 0.99999)], []),  # by rounding
        ([changed(0.2, 0.3), changed(0.5, 0.1)], [Severity.ERROR]),  # by hand
    ],
)
def test_gradients_that_are_changed_after_each_micro_batch(ranks: Any, found: list[Severity]) -> None:
    assert [one.severity for one in judge_partial_changes(GradientChanges(between_backwards=ranks))] == found


def hooked(*changes: HookedGradient | None) -> list[GradientsHooked]:
    return [GradientsHooked(0, step, CLIPS, {"weight": change}) for step, change in enumerate(changes) if change]


def scaled(*factors: float) -> list[GradientsHooked]:
    return hooked(*(HookedGradient("scaled", factor) for factor in factors))


def of_both(*factors: tuple[float, float]) -> list[GradientsHooked]:
    both = [dict(zip("ab", map(partial(HookedGradient, "scaled"), each), strict=True)) for each in factors]
    return [GradientsHooked(0, step, CLIPS, changes) for step, changes in enumerate(both)]


def of_module(*factors: float) -> list[GradientsHooked]:
    return [GradientsHooked(0, step, CLIPS, {}, {"head": factor}) for step, factor in enumerate(factors)]


OTHERWISE, CUT = HookedGradient(), HookedGradient("limited", 0.05)
ONE_MASK, OTHER_MASK = HookedGradient("masked", 1.0, 17), HookedGradient("masked", 1.0, 18)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([scaled(0.2, 0.3), scaled(0.5, 0.1)], [Severity.ERROR]),  # by each rank's own norm
        ([scaled(0.5, 0.5), scaled(0.5, 0.5)], []),
        ([scaled(0.5, 0.5), []], [Severity.ERROR]),  # on one rank alone
        ([scaled(0.8, 0.6), scaled(1.2, 1.4)], []),  # a weighted average, by the number of samples
        ([scaled(0.2), scaled(0.5)], []),  # once
        ([hooked(ONE_MASK, ONE_MASK), hooked(OTHER_MASK, OTHER_MASK)], [Severity.ERROR]),
        ([hooked(CUT, None, CUT), hooked(None, CUT)], [Severity.WARNING]),
        ([hooked(OTHERWISE, OTHERWISE), scaled(0.5, 0.5)], []),  # not known
        ([hooked(ONE_MASK, ONE_MASK)] * 2, []),
        ([of_both((3.0, 3.0), (5.0, 5.0)), of_both((8.0, 8.0), (2.0, 2.0))], []),  # by samples, divided out later
        ([of_both((3.0, 3.0), (5.0, 5.0)), of_both((8.0, 8.0))], []),  # of one sample: as it was
        ([of_both((0.2, 0.4), (0.3, 0.1)), of_both((0.5, 0.3), (0.1, 0.2))], [Severity.ERROR]),  # by each norm
        ([[], of_module(0.1, 0.1)], [Severity.ERROR]),
        ([of_module(0.5, 0.5), of_module(1.5, 1.5)], []),  # a weighted average
        ([[], of_module(0.1, 0.3)], []),  # of the samples, perhaps
        ([[], of_module(0.1)], []),  # once
    ],
)
def test_hooks_that_change_gradients_before_their_average(ranks: Any, found: list[Severity]) -> None:
    findings = [(finding.code, finding.severity, finding.location) for finding in judge_hooked(ranks, range(3))]
    assert findings == [("DDP310", severity, CLIPS) for severity in found]
    assert not judge_hooked(ranks, [0])  # one step in which every rank was looked at


@pytest.mark.parametrize(
    ("weight", "bias", "steps", "found"),
    [
        (2.0, HookedGradient("scaled", 2.0), 3, True),
        (2.0, HookedGradient(), 3, True),  # a bias of one element: no kind of change is known
        (1.0, HookedGradient("scaled", 2.0), 3, False),  # biases learn twice as fast
        (2.0, HookedGradient("scaled", 2.0), 4, False),  # not in every step
    ],
)
def test_hooks_that_scale_by_the_world_size(weight: float, bias: HookedGradient, steps: int, found: bool) -> None:
    changes = {"weight": HookedGradient("scaled", weight), "bias": bias}
    ranks = [[GradientsHooked(0, step, CLIPS, changes) for step in range(3)]] * 2
    words = "DDP303 ... at train.py:32" if found else ""
    assert_says(judge_scaled_by_hooks(ranks, range(steps), {"weight", "bias"}), words)
    assert not judge_scaled_by_hooks(ranks, range(steps), {"weight", "bias", "head"})  # which no hook changes


def pace(*runs: tuple[int, int, int], reductions: int = 24) -> WrapperPace:
    return WrapperPace(tuple(PaceRun(0, *run, BACKWARD) for run in runs), reductions)


SKIPS_5, SKIPS_9 = pace((0, 1, 1), (5, 2, 2), (6, 1, 1)), pace((0, 1, 1), (9, 2, 2), (10, 1, 1))
SKIPS_FIRST, SKIPS_LAST = pace((0, 2, 2), (1, 1, 1)), pace((0, 1, 1), (24, 1, 1))
PASSES_5, PASSES_9 = pace((0, 1, 1), (5, 1, 2), (6, 1, 1)), pace((0, 1, 1), (9, 1, 2), (10, 1, 1))


@pytest.mark.parametrize(
    ("paces", "found"),
    [
        ([SKIPS_5, SKIPS_9], [Severity.ERROR]),
        ([SKIPS_5, SKIPS_5], []),  # all ranks together
        ([PASSES_5, PASSES_9], [Severity.WARNING]),
        ([pace((0, 1, 1), (5, 9, 1), (6, 1, 1)), SKIPS_9], []),  # passes of something else
        ([pace(*((n, 1 + n % 3, 1) for n in range(24))), SKIPS_9], []),  # no regular pace
        ([SKIPS_FIRST, SKIPS_LAST], [Severity.ERROR]),  # all steps are averaged with others
        ([pace((0, 1, 1), (5, 2, 1), (6, 1, 1)), pace((0, 1, 1), (9, 2, 1), (10, 1, 1))], []),  # the same batch again
        ([SKIPS_5, pace((0, 1, 1), reductions=25)], []),  # which ends otherwise, and is told by that
        ([SKIPS_LAST, SKIPS_LAST], []),
        ([pace((0, 1, 0), (5, 2, 0), (6, 1, 0)), pace((0, 1, 0), (24, 1, 0))], [Severity.ERROR]),  # without a loader
    ],
)
def test_steps_that_shift_between_ranks(paces: list[WrapperPace], found: list[Severity]) -> None:
    findings = judge_shifts(paces)
    assert [(one.code, one.severity) for one in findings] == [("DDP508", severity) for severity in found]


@pytest.mark.parametrize(("own", "where"), [(True, CLIPS), (False, BACKWARD)])
def test_gradients_that_are_used_again(own: bool, where: Location) -> None:
    def judged(steps: int, *names: str) -> list[Finding]:
        stale = [StaleGradients(0, own, OTHER, BACKWARD, CLIPS, names, number) for number in range(1, steps + 1)]
        return judge_stale_gradients(Loop(2, stale=[stale]))

    assert_says(judged(MIN_STALE_STEPS), f"DDP520 ... ('zero_grad',) ... at {where}")
    assert_says(judged(MIN_STALE_STEPS, "0/body.weight"), "('body.weight',) ... gradients of body.weight")
    assert not judged(MIN_STALE_STEPS - 1)


NOTHING_MOVES = {"0/body": False, "0/head": False}
BODY_MOVES = {"0/body": True, "0/head": False}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (OptimizedParameters(BODY_MOVES, ["0/body"], MADE), ["head"]),
        (OptimizedParameters(BODY_MOVES, ["0/body", "0/head"], MADE), []),  # at a rate of zero
        (OptimizedParameters(BODY_MOVES, [], MADE), []),  # an optimizer that is none of torch's
        (OptimizedParameters(NOTHING_MOVES, [], MADE, True), ["body", "head"]),  # the optimizer is of another model
        (OptimizedParameters(NOTHING_MOVES, [], MADE, False), []),  # of inputs, say, whose gradients are wanted
        (OptimizedParameters(BODY_MOVES, [], MADE, True), []),  # moved by other code
    ],
)
def test_parameters_that_no_optimizer_holds(parameters: OptimizedParameters, found: list[str]) -> None:
    findings = judge_params_without_optimizer(parameters)
    assert [(one.code, list(one.subjects)) for one in findings] == [("DDP504", found)] * bool(found)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ["head"]),
        ({"options": {"module": "torch.optim.sgd", "class": "SGD", "group 0 lr": "0.1"}}, []),  # by rounding only
        ({"norms": {"0/body": 1.0}}, []),  # its gradient is taken away
        ({"ddp_params": ("0/head",)}, []),  # nothing of what it holds moves
        ({"options": {"module": "train", "class": "Muon", "group 0 lr": "0.0"}}, []),
    ],
)
def test_parameters_that_an_optimizer_of_the_script_does_not_move(change: dict[str, Any], found: list[str]) -> None:
    options, norms = {"module": "train", "class": "Muon", "group 0 lr": "0.1"}, {"0/body": 1.0, "0/head": 2.0}
    of_step = OptimizerStep(0, 1, options, MADE, ("0/body", "0/head"), norms=norms)
    findings = judge_unchanged_params([[replace(of_step, **change)] * 2] * 3, BODY_MOVES)
    assert [(one.code, list(one.subjects)) for one in findings] == [("DDP504", found)] * bool(found)
