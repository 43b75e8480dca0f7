"""What a report draws of a script on its ranks and in a single process, from steps and shown numbers made by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import NumbersShown, ParityStep
from ddpcheck.findings.figures import LARGEST_VALUE, ParityCurve
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, Report
from ddpcheck.run.ending import Ending
from ddpcheck.run.parity_run import SingleRun
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.divergences import Parity
from ddpcheck.trace.parity_curves import MOST_CURVES, MOST_POINTS, curves

STEP, LOSS, SHOW = (Location("fit.py", line) for line in (31, 30, 44))


@dataclass(frozen=True)
class Run:
    """What a process has done: the norm of its gradients and its loss by step, and the texts that it has shown."""

    norms: Sequence[float] = (3.0, 2.0, 1.0)
    losses: Sequence[float | None] = (9.0, 6.0, 3.0)
    shown: Sequence[tuple[int, str, tuple[str, ...]]] = ()
    optimizer: int = 0
    during: bool = False

    def entries(self, rows: float) -> list[Entry]:
        known: dict[str, Any] = {"loss_at": LOSS, "samples": (0.25 * rows, rows), "elements": (4,)}
        made = [(norm, () if loss is None else (loss,)) for norm, loss in zip(self.norms, self.losses, strict=True)]
        steps = [
            ParityStep(self.optimizer, n, STEP, (norm,), (1.0,), (), (0.1,), losses, names=("weight",)[n:], **known)
            for n, (norm, losses) in enumerate(made)
        ]
        shown = [NumbersShown("printed", SHOW, text, numbers, n, True, self.during) for n, text, numbers in self.shown]
        return [*steps, *shown]


def started(rank: int, world_size: int, *runs: Run) -> RankTrace:
    entries = [entry for run in runs for entry in run.entries(8.0 / world_size)]
    return RankTrace(RankStarted(rank, world_size, "gloo"), entries, [])


def drawn(first: Run, second: Run, single: Run, noise: Run | None = None) -> dict[str, ParityCurve]:
    again = None if noise is None else started(0, 1, noise)
    comparison = Parity([started(0, 2, first), started(1, 2, second)], started(0, 1, single), again)
    return {one.name: one for one in curves(comparison)}


GRADIENTS, MEAN_LOSS = "norm of the gradients", "loss, mean over the ranks"


def test_equal_runs_have_two_curves_and_no_mark() -> None:
    gradients, loss = drawn(Run(), Run(), Run()).values()
    values = (3.0, 2.0, 1.0)
    assert gradients == ParityCurve(GRADIENTS, "optimizer step", (0, 1, 2), values, values, None, STEP)
    assert (loss.name, loss.location) == (MEAN_LOSS, LOSS)


def test_the_mark_is_at_the_first_step_that_differs_and_the_loss_is_the_mean_of_the_ranks() -> None:
    wrong, second = (Run(norms=(3.0, 2.4, 1.2), losses=losses) for losses in ((8.0, 5.0, 5.0), (10.0, 7.0, 5.0)))
    gradients, loss = drawn(wrong, second, Run()).values()
    assert gradients.diverges_at == 1 and gradients.ranks == (3.0, 2.4, 1.2)
    assert loss.ranks == pytest.approx((9.0, 6.0, 5.0)) and loss.diverges_at == 2


def test_what_random_numbers_change_as_much_is_not_marked() -> None:
    ranks = Run(norms=(3.0, 2.1, 9.0), losses=(9.0, 7.0, 3.0))
    noise = Run(norms=(3.0, 1.9, 1.0), losses=(9.0, 5.0, 3.0))
    assert [one.diverges_at for one in drawn(ranks, ranks, Run(), noise).values()] == [2, None]


def test_steps_without_a_loss_have_no_place_in_its_curve() -> None:
    two, single = Run(losses=(None, 6.0, 3.0)), Run(losses=(None, None, 3.0))
    assert drawn(two, two, two)[MEAN_LOSS].x == (1, 2) and [*drawn(single, single, single)] == [GRADIENTS]


def test_each_optimizer_has_curves_of_its_own() -> None:
    both = [Run(), Run(norms=(7.0, 7.0), losses=(0.1, 0.1), optimizer=1)]
    wrong = [both[0], Run(norms=(7.0, 5.0), losses=(0.1, 0.1), optimizer=1)]
    of_both = curves(Parity([started(0, 2, *wrong), started(1, 2, *wrong)], started(0, 1, *both)))
    assert [(len(curve.x), curve.diverges_at) for curve in of_both] == [(2, 1), (3, None), (3, None), (2, None)]
    names = [f"norm of the gradients of optimizer {n}" for n in (1, 0)]
    names += [f"loss of optimizer {n}, mean over the ranks" for n in (0, 1)]
    assert [curve.name for curve in of_both] == names


def shows(*values: str, text: str = "auc = #", steps: Sequence[int] = (1, 2, 3)) -> Run:
    return Run(shown=[(step, text, (value,)) for step, value in zip(steps, values, strict=False)])


def test_a_number_shown_after_evaluations_comes_first_if_it_alone_differs() -> None:
    wrong, right = shows("0.400", "0.250", "0.300"), shows("0.400", "0.500", "0.600")
    drawn_of = drawn(wrong, Run(), right)
    values = (0.4, 0.25, 0.3), (0.4, 0.5, 0.6)
    assert [*drawn_of] == ["printed: auc", GRADIENTS, MEAN_LOSS]
    assert drawn_of["printed: auc"] == ParityCurve("printed: auc", "optimizer step", (1, 2, 3), *values, 2, SHOW)


def test_what_is_shown_once_or_in_a_pass_or_counts_epochs_or_is_the_ranks_own_is_not_drawn() -> None:
    assert len(drawn(shows("0.4"), Run(), shows("0.4"))) == 2
    assert len(drawn(shows("0", "1", "2"), Run(), shows("0", "1", "2"))) == 2
    assert len(drawn(shows("0.4", "0.5"), shows("0.6", "0.7"), shows("0.5", "0.6"))) == 2
    passing = replace(shows("0.4", "0.5"), during=True)
    assert len(drawn(passing, Run(), passing)) == 2
    assert len(drawn(shows("10", "14", "19"), Run(), shows("10", "14", "19"))) == 3


CROSSING, LACKING = (0.9, 1e-9, -0.3), (0.9, math.nan, 0.3)


@pytest.mark.parametrize(
    ("ranks", "single", "name", "mark"),
    [
        (Run(losses=(4.5, 3.0, 1.5)), Run(), MEAN_LOSS, None),  # a factor of its own; gradients are equal
        (Run(norms=(3.0, 2.0, 9.0), losses=CROSSING), Run(losses=(0.9, 2e-9, -0.3)), MEAN_LOSS, None),  # near zero
        (Run(norms=(3.0, 2.0, 9.0), losses=LACKING), Run(losses=LACKING), MEAN_LOSS, None),  # both lack numbers
        (shows("0.40", "0.50"), shows("0.41", "0.50"), "printed: auc", None),  # by the last digit
        (shows("64", "128"), shows("128", "256"), "printed: auc", 1),  # a count
    ],
)
def test_the_mark_of_a_curve(ranks: Run, single: Run, name: str, mark: int | None) -> None:
    assert drawn(ranks, replace(ranks, shown=()), single)[name].diverges_at == mark


def test_names_are_the_words_before_a_number() -> None:
    long = "a long list of words that say what it is"
    for text, name in (("done\n  #/# {'f1': #}", "f1"), ("#", "number 1"), (f"the mean of {long} (#)", long)):
        fixed = ("7",) * (text.count("#") - 1)
        run = Run(shown=[(step, text, (*fixed, value)) for step, value in ((1, "0.5"), (2, "0.7"))])
        assert f"printed: {name}" in drawn(run, Run(), run)


def test_other_samples_leave_only_the_steps_before() -> None:
    of_ranks, of_single = started(0, 2, shows("0.4", "0.5")), started(0, 1, shows("0.4", "0.6"))
    other = [*of_single.entries[:2], ParityStep(0, 2, STEP, (1.0,), (1.0,), (), (), (), samples=(0.5, 9.0))]
    of_single = RankTrace(of_single.started, [*other, *of_single.entries[3:]], [])
    found = curves(Parity([of_ranks, started(1, 2, Run())], of_single))
    assert [(one.name, one.x) for one in found] == [(GRADIENTS, (0, 1)), (MEAN_LOSS, (0, 1))]


def test_at_most_six_and_those_that_differ_before_the_others() -> None:
    texts = [f"metric {letter} #" for letter in "abcdefgh"]
    run = Run(shown=[(step, text, (f"0.{step}",)) for step in (1, 2) for text in texts])
    wrong = Run(shown=[(step, text, ("0.9" if text == texts[-1] else f"0.{step}",)) for step, text, _ in run.shown])
    found = [*drawn(wrong, Run(), run)]
    assert len(found) == MOST_CURVES and found[:2] == ["printed: metric h", GRADIENTS]


def test_long_runs_are_thinned_and_keep_the_ends_and_the_divergence() -> None:
    norms = [1.0 + step / 100 for step in range(2000)]
    wrong = Run(norms=[norm * (2 if step >= 1001 else 1) for step, norm in enumerate(norms)], losses=(0.5,) * 2000)
    curve = drawn(wrong, wrong, replace(wrong, norms=norms))[GRADIENTS]
    assert MOST_POINTS - 1 <= len(curve.x) <= MOST_POINTS
    assert (curve.x[0], curve.x[-1]) == (0, 1999) and curve.diverges_at == 1001 in curve.x
    assert max(after - before for before, after in itertools.pairwise(curve.x)) <= 11
    assert [curve.ranks[n] for n in (0, -1)] == [wrong.norms[0], wrong.norms[-1]]


@pytest.mark.parametrize("value", [math.nan, 2 * LARGEST_VALUE])
def test_what_is_not_finite_is_none_and_comes_through_json(value: float) -> None:
    wrong = Run(norms=(3.0, math.inf, 1.0), losses=(9.0, value, 3.0))
    gradients, loss = drawn(wrong, wrong, Run(losses=(9.0, 6.0, value))).values()
    assert gradients.diverges_at == 1 and gradients.ranks == (3.0, None, 1.0)
    assert (loss.ranks, loss.single, loss.diverges_at) == ((9.0, None, 3.0), (9.0, 6.0, None), 1)
    report = Report("fit.py", curves=(gradients, loss))
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(("ranks", "words"), [((1.0,), "value at each place"), ((1.0, math.inf), "not finite")])
def test_a_curve_that_cannot_be_drawn_is_refused(ranks: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParityCurve("loss", "optimizer step", (0, 1), ranks, (1.0, 1.0))


def test_a_report_has_the_curves_of_the_run_in_a_single_process() -> None:
    ranks, single = [started(0, 2, Run()), started(1, 2, Run())], started(0, 1, Run())
    report = report_on_script("fit.py", Ending(), ranks, singles=[SingleRun([single])])
    assert [one.name for one in report.curves] == [GRADIENTS, MEAN_LOSS]
    assert report_on_script("fit.py", Ending(), ranks).curves == ()
    assert report_on_script("fit.py", Ending(), ranks, singles=[SingleRun(why_not="it hung")]).curves == ()
