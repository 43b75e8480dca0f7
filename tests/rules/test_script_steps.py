"""Micro-batches and what comes between them: clips, sums of means, judged on evidence; a fault and its twins each."""

from __future__ import annotations

from collections.abc import Sequence
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
    found = []
    for step in (0, 1, 2):
        for number, taken in enumerate(batches):
            last = number == len(batches) - 1
            one = LossDifferentiated(step, number, (ScaledTerm(kind, weight, 4),), BACKWARD, MADE, batches=taken)
            one = replace(one, wrappers=(0,)) if last or not put_off else replace(one, deferred_wrappers=(0,))
            found.append(one if again or last else replace(one, location=OTHER))
    return found


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
        (passes(0.25), []),
        (passes(1.0, put_off=False), []),  # losses one after the other; nobody says that these are micro-batches
        (passes(0.25, kind="sum"), ["DDP514"]),  # divided by its four elements by hand
        (windows([replace(one, multipliers=(*one.multipliers, 0.25), factor=one.factor / 4) for one in KD]), []),
    ],
)
def test_means_over_micro_batches_that_are_added_up(of_rank: list[LossDifferentiated], found: list[str]) -> None:
    findings = judge_view(Losses([of_rank, of_rank]))
    assert [one.code for one in findings] == found
    assert all(one.location == MADE for one in findings)


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
    ],
)
def test_hooks_that_change_gradients_before_their_average(ranks: Any, found: list[Severity]) -> None:
    findings = judge_hooked(ranks, range(3))
    assert [(one.code, one.severity) for one in findings] == [("DDP310", severity) for severity in found]
    assert all(finding.location == CLIPS for finding in findings)
    assert not judge_hooked(ranks, [0])  # one step in which every rank was looked at


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([(3.0, 3.0), (5.0, 5.0)], [(8.0, 8.0), (2.0, 2.0)], False),  # by the number of samples, divided out later
        ([(3.0, 3.0), (5.0, 5.0)], [(8.0, 8.0), ()], False),  # of one sample: as it was
        ([(0.2, 0.4), (0.3, 0.1)], [(0.5, 0.3), (0.1, 0.2)], True),  # by the norm of each gradient
    ],
)
def test_weights_of_batches_are_no_change(first: Any, second: Any, found: bool) -> None:
    def of(step: int, a: float, b: float) -> GradientsHooked:
        return GradientsHooked(0, step, CLIPS, {"a": HookedGradient("scaled", a), "b": HookedGradient("scaled", b)})

    ranks = [[of(step, *both) for step, both in enumerate(of_rank) if both] for of_rank in (first, second)]
    assert bool(judge_hooked(ranks, range(2))) is found


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([[], [0.1, 0.1]], True),
        ([[0.5, 0.5], [1.5, 1.5]], False),  # a weighted average
        ([[], [0.1, 0.3]], False),  # of the samples, perhaps
        ([[], [0.1]], False),  # once
    ],
)
def test_backward_hooks_of_modules_that_scale_by_rank(ranks: list[list[float]], found: bool) -> None:
    of_ranks = [
        [GradientsHooked(0, n, CLIPS, {}, {"head": factor}) for n, factor in enumerate(of_rank)] for of_rank in ranks
    ]
    findings = judge_hooked(of_ranks, range(3))
    assert [(one.code, one.subjects, one.location) for one in findings] == [("DDP310", ("head",), CLIPS)] * found


@pytest.mark.parametrize(
    ("weight", "bias", "steps", "found"),
    [
        (2.0, 2.0, 3, True),
        (2.0, None, 3, True),  # a bias of one element: no kind of change is known
        (1.0, 2.0, 3, False),  # biases learn twice as fast
        (2.0, 2.0, 4, False),  # not in every step
    ],
)
def test_hooks_that_scale_by_the_world_size(weight: float, bias: float | None, steps: int, found: bool) -> None:
    small = HookedGradient() if bias is None else HookedGradient("scaled", bias)
    changed = {"weight": HookedGradient("scaled", weight), "bias": small}
    hooked = [[GradientsHooked(0, step, CLIPS, changed) for step in range(3)]] * 2
    findings = judge_scaled_by_hooks(hooked, range(steps), {"weight", "bias"})
    assert [(one.code, one.location) for one in findings] == [("DDP303", CLIPS)] * found
    assert not judge_scaled_by_hooks(hooked, range(steps), {"weight", "bias", "head"})  # which no hook changes


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
        ({"wrapped_params": ("0/head",)}, []),  # nothing of what it holds moves
        ({"options": {"module": "train", "class": "Muon", "group 0 lr": "0.0"}}, []),
    ],
)
def test_parameters_that_an_optimizer_of_the_script_does_not_move(change: dict[str, Any], found: list[str]) -> None:
    options, norms = {"module": "train", "class": "Muon", "group 0 lr": "0.1"}, {"0/body": 1.0, "0/head": 2.0}
    of_step = OptimizerStep(0, 1, options, MADE, ("0/body", "0/head"), norms=norms)
    findings = judge_unchanged_params([[replace(of_step, **change)] * 2] * 3, BODY_MOVES)
    assert [(one.code, list(one.subjects)) for one in findings] == [("DDP504", found)] * bool(found)
