"""DDP314 on hand-made runs: what differs first, what noise decides, and what is a number of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import (
    EvaluationTraced,
    NotReplayed,
    NumbersShown,
    ParityEnded,
    ParityStep,
    PassTaken,
    TensorsSaved,
    TracedValue,
)
from ddpcheck.findings.evidence.script import GradientsClipped, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.rules.loss.ddp314_differs_from_single_process import codes_that_explain
from ddpcheck.rules.registry import judge_view
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.divergences import Parity

LOSS, SHOWS, SAVES = (Location("train.py", line) for line in (30, 40, 50))


def rank(entries: Sequence[Entry], number: int = 0, size: int = 2, made: int = 4, **more: Any) -> RankTrace:
    return RankTrace(RankStarted(number, size, "gloo"), [*entries, ParityEnded(made, made, **more)], [])


def steps(*norms: float, samples: float = 8.0, **more: Any) -> list[ParityStep]:
    """Steps with a gradient of these norms, of two parameters."""
    return [
        ParityStep(
            0,
            count,
            Location("train.py", 33),
            (0.6 * norm, 0.8 * norm),
            (1.0, 1.0),
            (norm, 0.0),
            (0.1,),
            (0.5 / (count + 1),),
            LOSS,
            names=("weight", "bias") if not count else (),
            samples=(samples / 2, samples),
            elements=(4, 1) if not count else (),
            **more,
        )
        for count, norm in enumerate(norms)
    ]


def shown(number: str, after: int, **more: Any) -> NumbersShown:
    named = {"evaluates": True} | more
    return NumbersShown("printed", SHOWS, "error #", (number,), after, **named)


def compared(of_ranks: Sequence[Entry], single: Sequence[Entry], noise: Sequence[Entry] | None = None) -> Parity:
    ranks = [rank(of_ranks), rank([one for one in of_ranks if isinstance(one, ParityStep)], 1)]
    return Parity(ranks, rank(single, 0, 1), None if noise is None else rank(noise, 0, 1))


ALIKE, ALONE = steps(3, 2, 1, 1), steps(3, 2, 1, 1, samples=16.0)


def test_equal_runs_have_no_finding_and_need_no_noise() -> None:
    both = compared([*ALIKE, shown("0.25", 4)], [*ALONE, shown("0.25", 4)])
    assert judge_view(both) == [] and both.not_compared == ""
    assert both.matches == "gradients of 4 steps equal those of a single process within 0; 1 shown number equal"
    assert both.is_equal


@pytest.mark.parametrize(("factor", "said"), [(2, "2 times those"), (0.5, "1/2 of those")])
def test_a_factor_of_the_world_size_is_named(factor: float, said: str) -> None:
    both = compared(steps(*(factor * norm for norm in (3, 2, 1, 1))), ALONE, ALONE)
    (found,) = judge_view(both)
    assert said in found.message and found.location == LOSS and found.severity is Severity.ERROR
    assert not both.is_equal


def test_the_first_step_that_differs_is_named_and_how_equal_those_before_were() -> None:
    (found,) = judge_view(compared(steps(3, 2, 1.2, 1.5), ALONE, ALONE))
    assert found.message.startswith("From optimizer step 2 on, the gradients on 2 ranks are 0.17 (relative) from those")
    assert any(one.startswith("before, 2 steps had the same gradients") for one in found.evidence)


@pytest.mark.parametrize(("noise", "finds"), [(1.0, True), (1.04, True), (1.06, False), (3.0, False)])
def test_what_noise_may_be_is_not_decided(noise: float, finds: bool) -> None:
    changed = steps(*(noise * norm for norm in (3, 2, 1, 1)), samples=16.0)
    both = compared(steps(*(1.2 * norm for norm in (3, 2, 1, 1))), ALONE, changed)
    assert bool(judge_view(both)) is finds
    assert ("not decided" in both.not_compared) is not finds


@pytest.mark.parametrize(("second", "decides"), [("0.4000", True), ("0.4100", False)])
def test_a_shown_number_is_decided_if_it_is_in_one_of_the_epochs(second: str, decides: bool) -> None:
    def epochs(made: list[ParityStep], *numbers: str) -> list[Entry]:
        return [*made, *(shown(number, 2 * epoch) for epoch, number in enumerate(numbers, 1))]

    alone, noise = epochs(ALONE, "0.5100", "0.4000"), epochs(ALONE, "0.5300", "0.4200")
    both = compared(epochs(ALIKE, "0.5000", second), alone, noise)
    assert judge_view(both) == []
    assert ("not decided" in both.not_compared) is not decides


def test_gradients_that_are_not_finite_in_both_runs_are_equal() -> None:
    assert judge_view(compared(steps(3, math.inf), steps(3, math.inf, samples=16.0))) == []
    assert judge_view(compared(steps(3, math.inf), steps(3, 2, samples=16.0), steps(3, 2, samples=16.0)))


def test_other_samples_or_another_model_are_not_compared() -> None:
    other = compared(steps(6, 2), steps(3, 2, samples=12.0))
    assert judge_view(other) == [] and "different samples" in other.not_compared
    wider = [replace(step, elements=(9, 1)) for step in steps(6, 2, samples=16.0)]
    model = compared(steps(3, 2), wider)
    assert judge_view(model) == [] and "a different model" in model.not_compared


def test_names_that_only_ranks_know_are_those_of_parameters_of_the_same_sizes() -> None:
    unnamed = [replace(step, names=("parameter 0", "parameter 1")[: 2 * (not step.count)]) for step in ALONE]
    assert judge_view(compared(ALIKE, unnamed)) == []


def test_without_a_wrapper_samples_are_known_if_all_was_replayed() -> None:
    none = steps(6, 4, samples=0.0)
    assert judge_view(compared(none, steps(3, 2, samples=0.0)))
    partly = compared(none, [*steps(3, 2, samples=0.0), NotReplayed("train.py:9", "their shapes differ")])
    assert judge_view(partly) == [] and "train.py:9 (their shapes differ)" in partly.not_compared


_Values = Sequence[tuple[int, str, float]]


def traced_at(*values: tuple[int, str, float]) -> EvaluationTraced:
    return EvaluationTraced(4, tuple(TracedValue("train.py", line, "score", name, (x,)) for line, name, x in values))


def test_a_number_after_an_evaluation_is_a_warning_at_the_line_that_first_differs() -> None:
    alone = [*ALONE, shown("1.0000", 4), traced_at((20, "total", 8.0), (21, "mean", 1.0), (22, "return", 1.0))]
    first = [*ALIKE, shown("0.5000", 4), traced_at((20, "total", 4.0), (21, "mean", 0.3), (22, "return", 0.5))]
    second = [*ALIKE, traced_at((20, "total", 4.0), (21, "mean", 0.4), (22, "return", 0.5))]
    (found,) = judge_view(Parity([rank(first), rank(second, 1)], rank(alone, 0, 1), rank(alone, 0, 1)))
    assert found.severity is Severity.WARNING and found.location == Location("train.py", 21)
    assert "0.5000, printed after 4 steps, is 1 in a single process" in found.message


@pytest.mark.parametrize(
    ("of_ranks", "alone", "numbers", "line"),
    [
        pytest.param(
            [
                [(20, "total", 4.0), (21, "result", 20.61), (22, "result", 20.558)],
                [(20, "total", 5.0), (21, "result", 20.506), (22, "result", 20.558)],
            ],
            [(20, "total", 9.0), (21, "result", 20.549), (22, "result", 20.549)],
            *(("20.558", "20.549"), 21),
            id="a difference that is small",
        ),
        pytest.param(
            [[(20, "share", 0.25), (22, "return", 0.25)]] * 2,
            [(20, "share", 0.5), (22, "return", 0.5)],
            *(("0.2500", "0.5000"), 20),
            id="a number that all ranks have alike is no part of a sum",
        ),
        pytest.param(
            [
                [(20, "world", 2.0), (20, "n", 3.0), (20, "n", 7.0), (21, "share", 0.4)],
                [(20, "world", 2.0), (20, "n", 9.0), (21, "share", 0.3)],
            ],
            [(20, "world", 1.0), (20, "n", 8.0), (20, "n", 12.0), (20, "n", 16.0), (21, "share", 0.5)],
            *(("0.4000", "0.5000"), 21),
            id="the number of ranks, and counts that change in other batches",
        ),
        pytest.param(
            [[(20, "value", 0.4375), (30, "best", 0.4375)], [(20, "value", 0.5625)]],
            [(20, "value", 0.5), (30, "best", 0.5)],
            *(("0.4375", "0.5000"), 20),
            id="where a copy comes from",
        ),
        pytest.param(
            [[(20, "value", 0.4375)], [(20, "value", 0.5625)]],
            [(20, "value", 0.5)],
            *(("0.4375", "0.5000"), 20),
            id="the number that is shown",
        ),
    ],
)
def test_the_line_is_the_first_that_makes_another_number(
    of_ranks: Sequence[_Values], alone: _Values, numbers: tuple[str, str], line: int
) -> None:
    entries = [[*ALIKE, shown(numbers[0], 4), traced_at(*of_ranks[0])], [*ALIKE, traced_at(*of_ranks[1])]]
    single = rank([*ALONE, shown(numbers[1], 4), traced_at(*alone)], 0, 1)
    (found,) = judge_view(Parity([rank(entries[0]), rank(entries[1], 1)], single, single))
    assert found.location == Location("train.py", line)


def test_statistics_of_each_rank_are_named() -> None:
    single = rank(ALONE, 0, 1, splits_statistics=True)
    assert Parity([rank(ALIKE), rank(ALIKE, 1)], single).matches.endswith("separately in both (DDP304)")


def test_runs_without_steps_and_numbers_have_no_tick() -> None:
    assert compared([], []).not_compared == "no optimizer has stepped, and no number was shown after an evaluation"
    assert compared([shown("0.25", 0)], [shown("0.25", 0)]).not_compared == ""


def test_other_check_lines_are_confirmed_by_what_is_equal() -> None:
    equal = compared([*ALIKE, shown("0.25", 4)], [*ALONE, shown("0.25", 4)])
    assert equal.confirmed == {
        "loss": "gradients of 4 steps equal those of a single process",
        "evaluation": "1 shown number equal to those of a single process",
    }
    assert compared([*ALIKE, shown("0.50", 4)], [*ALONE, shown("0.25", 4)]).confirmed == {}
    assert compared(steps(3, 2), steps(3, 2, samples=12.0)).confirmed == {}  # other samples
    local = compared([*ALIKE, shown("0.2604", 4)], [*ALONE, shown("0.2500", 4)])  # the mean of losses
    assert [*local.confirmed] == ["loss"]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(shown("0.50", 4, evaluates=False), id="in training"),
        pytest.param(shown("0.50", 4, during=True), id="batch by batch"),
        pytest.param(shown("0.50", 4, known=(0,)), id="known before the evaluation"),
        pytest.param(shown("0.2604", 4), id="the mean of the losses of rank 0"),
    ],
)
def test_a_number_of_one_rank_is_none_of_an_evaluation(entry: NumbersShown) -> None:
    assert judge_view(compared([*ALIKE, entry], [*ALONE, shown("1.00", 4)], [*ALONE, shown("1.00", 4)])) == []


@pytest.mark.parametrize(("rows", "finds"), [(24, True), (25, False), (28, False), (48, True)])
def test_samples_that_evaluations_repeat_may_change_a_number(rows: int, finds: bool) -> None:
    def evaluated(count: int) -> PassTaken:
        return PassTaken("DataLoader train.py:9#0 pass 0", count, 24, trains=False)

    ranks = [rank([*ALIKE, evaluated(12), shown("0.2575", 4)]), rank([*ALIKE, evaluated(rows - 12)], 1)]
    made = Parity(ranks, rank([*ALONE, evaluated(24), shown("0.2500", 4)], 0, 1))
    assert bool(judge_view(made)) is finds


def test_what_a_faster_clock_changes_is_no_difference() -> None:
    took = (shown(number, 4) for number in ("0.9031", "0.0125", "0.1876"))
    on_ranks, alone, faster = ([*made, entry] for made, entry in zip((ALIKE, ALONE, ALONE), took, strict=True))
    assert judge_view(compared(on_ranks, alone, faster)) == []


def test_a_sum_over_ranks_that_is_shown_in_training_is_told_by_its_factor() -> None:
    def every(*numbers: str) -> list[NumbersShown]:
        return [shown(number, after + 1, evaluates=False) for after, number in enumerate(numbers)]

    of_ranks, alone = every("2.0000", "1.8000", "1.6000"), every("1.0000", "0.9000", "0.8000")
    (found,) = judge_view(compared([*ALIKE, *of_ranks], [*ALONE, *alone], ALONE))
    assert "(factor 2)" in found.message


def test_what_is_saved_is_compared_by_names_shapes_and_values() -> None:
    def saved(shapes: dict[str, tuple[int, ...]], norm: float = 1.0) -> TensorsSaved:
        return TensorsSaved(SAVES, 4, shapes, dict.fromkeys(shapes, (norm, norm)))

    whole = saved({"bank": (16, 2), "head": (4,)})
    for entry, said in (
        (saved({"bank": (8, 2), "head": (4,)}), "bank (different shapes)"),
        (saved({"head": (4,)}), "bank (missing)"),
        (saved({"bank": (16, 2), "head": (4,)}, 2.0), "bank and head (different values)"),
    ):
        (found,) = judge_view(compared([*ALIKE, entry], [*ALONE, whole], [*ALONE, whole]))
        assert said in found.message and found.location == SAVES and found.severity is Severity.WARNING
    assert judge_view(compared([*ALIKE, whole], [*ALONE, whole])) == []
    moments = {"head.bias.exp_avg": (4,), "body.bias.exp_avg": (4,)}
    rounded = [
        TensorsSaved(SAVES, 4, moments, dict(zip(moments, ((0.5,), (norm,)), strict=True))) for norm in (9e-15, 2e-14)
    ]
    assert judge_view(compared([*ALIKE, rounded[0]], [*ALONE, rounded[1]], [*ALONE, rounded[1]])) == []


@pytest.mark.parametrize(("noise", "finds"), [((1.3, 1.0), True), ((1.3, 1.2), False)])
def test_noise_of_a_saved_tensor_is_the_largest_change_in_its_norms(noise: tuple[float, ...], finds: bool) -> None:
    """By chance, rounding of a bias that has no other gradient leaves its norm as it is."""
    on_ranks, alone, again = (
        TensorsSaved(SAVES, 4, {"bias": (4,)}, {"bias": n}) for n in ((1.7, 1.0), (1.3, 1.0), noise)
    )
    assert bool(judge_view(compared([*ALIKE, on_ranks], [*ALONE, alone], [*ALONE, again]))) is finds


def with_values(made: list[ParityStep], *sizes: float) -> list[ParityStep]:
    return [replace(step, values=(1.0, size)) for step, size in zip(made, sizes, strict=True)]


@pytest.mark.parametrize(("noise", "finds"), [(1.0, True), (1.002, True), (1.005, False)])
def test_parameters_that_differ_after_equal_gradients_are_those_of_the_update(noise: float, finds: bool) -> None:
    built = OptimizerStep(0, 0, {}, Location("train.py", 33), made=Location("train.py", 12))
    on_ranks = with_values(steps(3, 2, 1.1, 1.2), 1.0, 1.0, 1.01, 1.02)
    alone, again = with_values(ALONE, 1.0, 1.0, 1.0, 1.0), with_values(ALONE, 1.0, 1.0, noise, noise)
    found = [one for one in judge_view(compared([built, *on_ranks], alone, again)) if one.subjects == ("update",)]
    assert bool(found) is finds
    for one in found:
        assert one.message.startswith("Before optimizer step 2, the parameters on 2 ranks are 0.0071 (relative)")
        assert one.location == Location("train.py", 12) and "norm of bias: 1.01 and 1" in one.evidence


def test_parameters_after_the_last_step_on_the_same_samples_are_compared() -> None:
    """The inputs of a discriminator are computed with parameters that differ already."""
    on_ranks = with_values(steps(3, 2, 1, 1), 1.0, 1.0, 1.01, 1.02)
    alone = [*steps(3, 2, samples=16.0), *steps(3, 2, 1, 1, samples=12.0)[2:]]
    both = compared(on_ranks, with_values(alone, 1.0, 1.0, 1.0, 1.0), with_values(alone, 1.0, 1.0, 1.0, 1.0))
    (found,) = judge_view(both)
    assert found.subjects == ("update",) and found.message.startswith("Before optimizer step 2, the parameters")
    same = compared(with_values(on_ranks, 1.0, 1.0, 1.0, 1.02), with_values(alone, 1.0, 1.0, 1.0, 1.0))
    assert judge_view(same) == []  # of a later step, parameters follow from other samples


def test_a_clip_with_another_limit_is_no_fault_of_the_loss() -> None:
    clipped = [
        [replace(step, clip=(3.0, limit)) for step in made]
        for made, limit in ((steps(0.5, 0.5), 0.5), (steps(1, 1, samples=16.0), 1.0))
    ]
    at = GradientsClipped(0, 3.0, Location("train.py", 31), limit=0.5)
    (found,) = judge_view(compared([at, *clipped[0]], clipped[1], clipped[1]))
    assert found.subjects == ("clip",) and found.location == at.location
    assert any("clipped to 0.5 and 1; the norm before is 3 in both" in one for one in found.evidence)


def test_other_numbers_of_steps_are_told() -> None:
    (found,) = judge_view(Parity([rank(ALIKE), rank(ALIKE, 1)], rank(ALONE, 0, 1, made=6)))
    assert found.message == "The ranks make 4 optimizer steps, a single process makes 6."


def rated(made: list[ParityStep], *rates: float) -> list[ParityStep]:
    return [replace(step, rates=(rate,)) for step, rate in zip(made, rates, strict=True)]


FALLS, PLATEAU = (0.4, 0.3, 0.2, 0.1), (0.4, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("of_ranks", "alone", "noise", "message"),
    [
        (FALLS, (0.2, 0.15, 0.1, 0.0), None, "learning rate"),
        (FALLS, (0.2, 0.15, 0.1, 0.05), None, ""),
        ((0.4, 0.3, 0.2, 0.049), (0.2, 0.15, 0.1, 0.029), None, ""),  # scaled, and fall to one that is not: 0.01
        ((0.4, 0.3, 0.2, 0.2), (0.2, 0.15, 0.1, 0.01), None, "learning rate"),
        ((0.2, 0.3, 0.4, 0.2), (0.2, 0.2, 0.2, 0.1), None, ""),  # a warm-up that begins at the rate of one process
        ((0.2, 0.4, 0.4, 0.4), (0.1, 0.15, 0.175, 0.2), None, "learning rate"),  # one that is over too soon
        (PLATEAU, FALLS, None, "At step 1, the learning rate on the ranks is at 0.25 of its highest value"),
        ((0.4, 0.2, 0.2, 0.1), (0.4, 0.4, 0.4, 0.1), PLATEAU, ""),  # by a metric that noise changes
    ],
)
def test_schedules_that_end_at_other_rates_are_told(of_ranks: Any, alone: Any, noise: Any, message: str) -> None:
    again = rated(ALONE, *noise) if noise else None
    messages = [
        finding.message for finding in judge_view(compared(rated(ALIKE, *of_ranks), rated(ALONE, *alone), again))
    ]
    assert [message in each for each in messages] == [True] * bool(message)


@pytest.mark.parametrize(("scales", "sooner"), [(False, 0.4), (True, 0.4), (True, 0.5)])
def test_a_schedule_that_accelerate_steps_for_each_rank_is_no_difference(scales: bool, sooner: float) -> None:
    on_ranks, alone = rated(ALIKE, 0.8, 0.6, sooner, 0.2), rated(ALONE, 0.8, 0.7, 0.6, sooner)
    single = rank(alone, 0, 1, steps_schedules=scales)
    assert bool(judge_view(Parity([rank(on_ranks), rank(on_ranks, 1)], single))) is not scales


def test_a_scaled_rate_that_is_shown_is_no_difference() -> None:
    def runs(number: str, alone: str, scale: float = 0.5) -> Parity:
        both = [[replace(step, rates=(0.4 * by,)) for step in made] for made, by in ((ALIKE, 1.0), (ALONE, scale))]
        of_ranks, single = ([*made, shown(n, 4)] for made, n in zip(both, (number, alone), strict=True))
        return compared(of_ranks, single, single)

    assert judge_view(runs("0.4", "0.2")) == []
    (found,) = judge_view(runs("0.8", "0.4"))
    assert found.subjects == ("shown",)
    assert judge_view(runs("0.4", "0.2", scale=1.0)) != []


def test_an_early_end_has_the_line_of_the_number_that_decides_it() -> None:
    first = rank([*ALIKE, traced_at((20, "value", 0.3), (31, "best", 0.3))])
    other = rank([*ALIKE, traced_at((20, "value", 0.5))], 1)
    alone = rank([*ALONE, traced_at((20, "value", 0.4), (31, "best", 0.4))], 0, 1, made=6)
    (found,) = judge_view(Parity([first, other], alone))
    assert found.location == Location("train.py", 20) and "make 4 optimizer steps" in found.message


def test_an_epoch_of_fewer_samples_is_told() -> None:
    def epoch(rows: int, chosen: int, *, trains: bool = True) -> PassTaken:
        return PassTaken("DataLoader train.py:9#0 pass 0", rows, chosen, trains)

    def runs(*made: PassTaken) -> Parity:
        *of_ranks, alone = made
        return Parity([rank([*ALIKE, one], n) for n, one in enumerate(of_ranks)], rank([*ALONE, alone], 0, 1))

    (found,) = judge_view(runs(epoch(32, 32), epoch(32, 32), epoch(64, 128)))
    assert found.message == "An epoch has 64 samples on 2 ranks, and 128 in a single process."
    assert found.location == Location("train.py", 9)
    for healthy in (
        runs(epoch(64, 64), epoch(64, 64), epoch(128, 128)),
        runs(epoch(65, 65), epoch(65, 65), epoch(130, 129)),  # padded
        runs(epoch(128, 128), epoch(128, 128), epoch(128, 128)),  # the same samples on purpose
        runs(epoch(32, -1), epoch(32, -1), epoch(64, -1)),
        runs(epoch(32, 32, trains=False), epoch(32, 32, trains=False), epoch(64, 128, trains=False)),
    ):
        assert judge_view(healthy) == []


def test_what_was_left_out_on_purpose_is_said() -> None:
    def compare(**named: Any) -> Parity:
        return Parity([rank(ALIKE, number, **named) for number in (0, 1)], rank(ALONE, 0, 1))

    assert compare(batch=4).matches.endswith("; with batches of at most 4 samples (--check-parity-batch)")
    assert compare(full_at=3, why_full="No space left on device").not_compared == (
        "samples are recorded for 3 backward passes only: No space left on device"
    )


def test_only_findings_that_may_explain_a_difference_stand_for_it() -> None:
    def finding(code: str, severity: Severity = Severity.WARNING) -> Finding:
        return Finding(code, ("x",), "", severity=severity)

    others = [*map(finding, ("DDP305", "DDP403", "DDP512", "DDP805")), finding("DDP101", Severity.NOTE)]
    assert codes_that_explain(finding("DDP314", Severity.ERROR), others) == ["DDP305"]
    assert codes_that_explain(finding("DDP314"), others) == ["DDP805"]
