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
    ParityPass,
    ParityStep,
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
from tests.reports import assert_says

LOSS, STEPS, SHOWS, SAVES = (Location("train.py", line) for line in (30, 33, 40, 50))
LOADER = "DataLoader train.py:9#0 pass 0"


def rank(entries: Sequence[Entry], number: int = 0, size: int = 2, made: int = 4, **more: Any) -> RankTrace:
    return RankTrace(RankStarted(number, size, "gloo"), [*entries, ParityEnded(made, made, **more)], [])


def steps(*norms: float, samples: float = 8.0) -> list[ParityStep]:
    """Steps with a gradient of these norms, of two parameters."""
    first: dict[str, Any] = {"names": ("weight", "bias"), "elements": (4, 1)}
    known: dict[str, Any] = {"values": (1.0, 1.0), "rates": (0.1,), "loss_at": LOSS, "samples": (samples / 2, samples)}
    made = [
        ParityStep(0, n, STEPS, norms=(0.6 * x, 0.8 * x), gradient=(x, 0.0), losses=(0.5 / (n + 1),), **known)
        for n, x in enumerate(norms)
    ]
    return [replace(step, **({} if step.count else first)) for step in made]


def shown(number: str, after: int, **more: Any) -> NumbersShown:
    return NumbersShown("printed", SHOWS, "error #", (number,), after, **{"evaluates": True} | more)


def compared(of_ranks: Sequence[Entry], single: Sequence[Entry], noise: Sequence[Entry] | None = None) -> Parity:
    ranks = [rank(of_ranks), rank([entry for entry in of_ranks if isinstance(entry, ParityStep)], 1)]
    return Parity(ranks, rank(single, 0, 1), None if noise is None else rank(noise, 0, 1))


ALIKE, ALONE = steps(3, 2, 1, 1), steps(3, 2, 1, 1, samples=16.0)


def of_two(first: Sequence[Entry], second: Sequence[Entry], *single: RankTrace) -> Parity:
    return Parity([rank(first), rank(second, 1)], *single)


def after(of_ranks: Entry, alone: Entry, noise: Entry | None = None) -> Parity:
    """Equal steps, and then one entry of the ranks, of the single process and of its noise."""
    return compared([*ALIKE, of_ranks], [*ALONE, alone], [*ALONE, noise or alone])


def scaled(factor: float, **more: Any) -> list[ParityStep]:
    return steps(*(factor * norm for norm in (3, 2, 1, 1)), **more)


def epochs(made: list[ParityStep], *numbers: str, **more: Any) -> list[Entry]:
    return [*made, *(shown(number, 2 * epoch, **more) for epoch, number in enumerate(numbers, 1))]


def repeated(rows: int) -> Parity:
    """A set of 24 samples of which the ranks evaluate `rows`."""
    first, second, whole = (ParityPass(LOADER, taken, 24, trains=False) for taken in (12, rows - 12, 24))
    single = rank([*ALONE, whole, shown("0.2500", 4)], 0, 1)
    return of_two([*ALIKE, first, shown("0.2575", 4)], [*ALIKE, second], single)


def saved(shapes: dict[str, tuple[int, ...]], *norms: float) -> TensorsSaved:
    return TensorsSaved(SAVES, 4, shapes, dict.fromkeys(shapes, norms or (1.0, 1.0)))


def taking(*rows: int, chosen: Sequence[int] = (), trains: bool = True) -> Parity:
    """Passes of two ranks and of a single process over so many samples, of which a sampler chose so many."""
    passes = [ParityPass(LOADER, n, m, trains) for n, m in zip(rows, chosen or rows, strict=True)]
    return of_two([*ALIKE, passes[0]], [*ALIKE, passes[1]], rank([*ALONE, passes[2]], 0, 1))


def rated(made: list[ParityStep], *rates: float) -> list[ParityStep]:
    return [replace(step, rates=(rate,)) for step, rate in zip(made, rates, strict=True)]


def at_rates(of_ranks: Sequence[float], alone: Sequence[float], noise: Sequence[float] | None = None) -> Parity:
    return compared(rated(ALIKE, *of_ranks), rated(ALONE, *alone), rated(ALONE, *noise) if noise else None)


def shown_rate(number: str, alone: str, scale: float = 0.5) -> Parity:
    both = [[replace(step, rates=(0.4 * by,)) for step in made] for made, by in ((ALIKE, 1.0), (ALONE, scale))]
    of_ranks, single = ([*made, shown(n, 4)] for made, n in zip(both, (number, alone), strict=True))
    return compared(of_ranks, single, single)


def with_values(made: list[ParityStep], *sizes: float) -> list[ParityStep]:
    return [replace(step, values=(1.0, size)) for step, size in zip(made, sizes, strict=True)]


def of_other_samples(*sizes: float) -> Parity:
    """The inputs of a discriminator are computed with parameters that differ already."""
    alone = with_values([*steps(3, 2, samples=16.0), *steps(3, 2, 1, 1, samples=12.0)[2:]], 1.0, 1.0, 1.0, 1.0)
    return compared(with_values(ALIKE, *sizes), alone, alone)


CLIPS = GradientsClipped(0, 3.0, Location("train.py", 31), limit=0.5)
CLIPPED, CLIPPED_ALONE = (
    [replace(step, clip=(3.0, limit)) for step in made]
    for made, limit in ((steps(0.5, 0.5), 0.5), (steps(1, 1, samples=16.0), 1.0))
)
BANK = saved({"bank": (16, 2), "head": (4,)})
BIAS = {"bias": (4,)}
MOMENTS = {"head.bias.exp_avg": (4,), "body.bias.exp_avg": (4,)}
ROUNDED = [TensorsSaved(SAVES, 4, MOMENTS, dict(zip(MOMENTS, ((0.5,), (n,)), strict=True))) for n in (9e-15, 2e-14)]
UNNAMED = [replace(step, names=("parameter 0", "parameter 1")[: 2 * (not step.count)]) for step in ALONE]
WIDER = [replace(step, elements=(9, 1)) for step in steps(6, 2, samples=16.0)]
NOT_SAMPLED, NOT_SAMPLED_ALONE = steps(6, 4, samples=0.0), steps(3, 2, samples=0.0)
NOISY = ("0.5100", "0.4000"), ("0.5300", "0.4200")
TRAINS = {"evaluates": False}
FULL = [rank(ALIKE, n, full_at=3, why_full="No space left on device") for n in (0, 1)]
LEFT_OUT = NotReplayed("train.py:9", "their shapes differ")
OF_ACCELERATE = rank(rated(ALONE, 0.8, 0.7, 0.6, 0.4), 0, 1, steps_schedules=True)
RISING = rated(ALIKE, 0.8, 0.6, 0.4, 0.2)
FALLS, PLATEAU = (0.4, 0.3, 0.2, 0.1), (0.4, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("parity", "words"),
    [
        (compared(scaled(2), ALONE, ALONE), "error ... at train.py:30 ... 2 times those"),
        (compared(steps(3, 2, 1.2, 1.5), ALONE, ALONE), "From optimizer step 2 on, the gradients on 2 ranks are 0.17"),
        (compared(steps(3, math.inf), steps(3, math.inf, samples=16.0)), ""),
        (compared(steps(3, math.inf), steps(3, 2, samples=16.0), steps(3, 2, samples=16.0)), "the gradients"),
        (compared(ALIKE, UNNAMED), ""),  # their sizes are the same
        (compared(NOT_SAMPLED, NOT_SAMPLED_ALONE), "the gradients"),  # without a wrapper; all was replayed
        (after(shown("0.50", 4, evaluates=False), shown("1.00", 4)), ""),
        (after(shown("0.50", 4, known=(0,)), shown("1.00", 4)), ""),  # known before the evaluation
        (after(shown("0.2604", 4), shown("1.00", 4)), ""),  # the mean of the losses of rank 0
        (after(shown("0.9031", 4), shown("0.0125", 4), shown("0.1876", 4)), ""),  # times
        (repeated(24), "0.2575"),
        (repeated(25), ""),
        (repeated(48), "0.2575"),
        (compared(epochs(ALIKE, "2.0", "1.8", **TRAINS), epochs(ALONE, "1.0", "0.9", **TRAINS), ALONE), "(factor 2)"),
        (after(saved({"bank": (8, 2), "head": (4,)}), BANK), "warning ... at train.py:50 ... bank (different shapes)"),
        (after(saved({"head": (4,)}), BANK), "bank (missing)"),
        (after(BANK, BANK), ""),
        (after(*ROUNDED), ""),
        (after(*(saved(BIAS, *norms) for norms in ((1.7, 1.0), (1.3, 1.0), (1.3, 1.0)))), "bias (different values)"),
        (after(*(saved(BIAS, *norms) for norms in ((1.7, 1.0), (1.3, 1.0), (1.3, 1.2)))), ""),  # of one norm of two
        (of_other_samples(1.0, 1.0, 1.01, 1.02), "('update',) ... : Before optimizer step 2, the parameters"),
        (of_other_samples(1.0, 1.0, 1.0, 1.02), ""),  # in a later step, they follow from other samples
        (compared([CLIPS, *CLIPPED], CLIPPED_ALONE, CLIPPED_ALONE), "('clip',) ... at train.py:31 ... to 0.5 and 1;"),
        (of_two(ALIKE, ALIKE, rank(ALONE, 0, 1, made=6)), "The ranks make 4 optimizer steps, a single process makes 6"),
        (at_rates(FALLS, (0.2, 0.15, 0.1, 0.0)), "learning rate"),
        (at_rates(FALLS, (0.2, 0.15, 0.1, 0.05)), ""),
        (at_rates((0.4, 0.3, 0.2, 0.049), (0.2, 0.15, 0.1, 0.029)), ""),  # scaled, and fall to one that is not: 0.01
        (at_rates((0.2, 0.3, 0.4, 0.2), (0.2, 0.2, 0.2, 0.1)), ""),  # a warm-up from the rate of one process
        (at_rates((0.2, 0.4, 0.4, 0.4), (0.1, 0.15, 0.175, 0.2)), "learning rate"),  # a warm-up that is over too soon
        (at_rates(PLATEAU, FALLS), "At step 1, the learning rate on the ranks is at 0.25 of its highest value"),
        (at_rates((0.4, 0.2, 0.2, 0.1), (0.4, 0.4, 0.4, 0.1), PLATEAU), ""),  # by a metric that noise changes
        (of_two(RISING, RISING, OF_ACCELERATE), ""),  # which steps a schedule for each rank
        (shown_rate("0.4", "0.2"), ""),
        (shown_rate("0.4", "0.2", scale=1.0), "('shown',)"),
        (taking(32, 32, 64, chosen=(32, 32, 128)), "at train.py:9 ... : An epoch has 64 samples on 2 ranks, and 128"),
        (taking(64, 64, 128), ""),
        (taking(65, 65, 130, chosen=(65, 65, 129)), ""),  # padded
        (taking(128, 128, 128), ""),  # the same samples on purpose
        (taking(32, 32, 64, chosen=(-1, -1, -1)), ""),
        (taking(32, 32, 64, chosen=(32, 32, 128), trains=False), ""),
    ],
)
def test_what_differs_from_a_single_process(parity: Parity, words: str) -> None:
    assert_says(judge_view(parity), words)


@pytest.mark.parametrize(
    ("parity", "words"),
    [
        (compared(scaled(1.2), ALONE, scaled(1.06, samples=16.0)), "not decided"),
        (compared(epochs(ALIKE, "0.5000", "0.4000"), *(epochs(ALONE, *numbers) for numbers in NOISY)), ""),
        (compared(epochs(ALIKE, "0.5000", "0.4100"), *(epochs(ALONE, *numbers) for numbers in NOISY)), "not decided"),
        (compared(steps(6, 2), steps(3, 2, samples=12.0)), "different samples"),
        (compared(steps(3, 2), WIDER), "a different model"),
        (compared(NOT_SAMPLED, [*NOT_SAMPLED_ALONE, LEFT_OUT]), "train.py:9 (their shapes differ)"),
        (compared([], []), "no optimizer has stepped, and no number was shown after an evaluation"),
        (compared([shown("0.25", 0)], [shown("0.25", 0)]), ""),
        (Parity(FULL, rank(ALONE, 0, 1)), "samples are recorded for 3 backward passes only: No space left on device"),
    ],
)
def test_what_is_not_compared_has_its_reason_and_no_finding(parity: Parity, words: str) -> None:
    assert judge_view(parity) == []
    assert words in parity.not_compared and bool(words) == bool(parity.not_compared)


@pytest.mark.parametrize(("noise", "finds"), [(1.002, True), (1.005, False)])
def test_parameters_that_differ_after_equal_gradients_are_those_of_the_update(noise: float, finds: bool) -> None:
    built = OptimizerStep(0, 0, {}, STEPS, built_at=Location("train.py", 12))
    on_ranks = with_values(steps(3, 2, 1.1, 1.2), 1.0, 1.0, 1.01, 1.02)
    parity = compared([built, *on_ranks], *(with_values(ALONE, 1.0, 1.0, size, size) for size in (1.0, noise)))
    update = [finding for finding in judge_view(parity) if finding.subjects == ("update",)]
    words = "at train.py:12 ... Before optimizer step 2, the parameters on 2 ranks are 0.0071 ... of bias: 1.01 and 1"
    assert_says(update, words if finds else "")


def test_equal_runs_say_what_they_confirm() -> None:
    both = compared([*ALIKE, shown("0.25", 4)], [*ALONE, shown("0.25", 4)])
    assert judge_view(both) == [] and both.not_compared == "" and both.is_equal
    assert both.matches == "gradients of 4 steps equal those of a single process within 0; 1 shown number equal"
    assert both.confirmed == {
        "loss": "gradients of 4 steps equal those of a single process",
        "evaluation": "1 shown number equal to those of a single process",
    }
    assert not compared(scaled(2), ALONE, ALONE).is_equal
    assert compared(steps(3, 2), steps(3, 2, samples=12.0)).confirmed == {}  # other samples
    local = compared([*ALIKE, shown("0.2604", 4)], [*ALONE, shown("0.2500", 4)])  # the mean of losses
    assert [*local.confirmed] == ["loss"]
    single = rank(ALONE, 0, 1, splits_statistics=True)
    assert of_two(ALIKE, ALIKE, single).matches.endswith("separately in both (DDP304)")
    halved = Parity([rank(ALIKE, number, batch=4) for number in (0, 1)], rank(ALONE, 0, 1))
    assert halved.matches.endswith("; with batches of at most 4 samples (--check-parity-batch)")


def traced_at(numbers: str) -> EvaluationTraced:
    """Numbers like `20 total 8.0`: the line, the name, the value."""
    split = [number.split() for number in numbers.split(", ")]
    values = [TracedValue("train.py", int(line), "score", name, (float(value),)) for line, name, value in split]
    return EvaluationTraced(4, tuple(values))


SMALL = [f"20 total {total}, 21 result {x}, 22 result 20.558" for total, x in ((4, 20.61), (5, 20.506))]
COUNTS = "20 world 2, 20 n 3, 20 n 7, 21 share 0.4", "20 world 2, 20 n 9, 21 share 0.3"


@pytest.mark.parametrize(
    ("of_ranks", "alone", "line"),
    [
        (("20 sum 4, 21 mean 0.3, 22 x 0.5", "20 sum 4, 21 mean 0.4, 22 x 0.5"), "20 sum 8, 21 mean 1, 22 x 1", 21),
        (SMALL, "20 total 9, 21 result 20.549, 22 result 20.549", 21),
        (("20 share 0.25, 22 return 0.25",) * 2, "20 share 0.5, 22 return 0.5", 20),  # alike: no part of a sum
        (COUNTS, "20 world 1, 20 n 8, 20 n 12, 20 n 16, 21 share 0.5", 21),  # counts change in other batches
        (("20 value 0.4375, 30 best 0.4375", "20 value 0.5625"), "20 value 0.5, 30 best 0.5", 20),  # a copy
        (("20 value 0.4375", "20 value 0.5625"), "20 value 0.5", 20),  # the shown one
    ],
)
def test_a_number_after_an_evaluation_is_a_warning_at_the_line_that_first_differs(
    of_ranks: Sequence[str], alone: str, line: int
) -> None:
    number, of_single = (f"{float(values.split()[-1]):.4f}" for values in (of_ranks[0], alone))
    entries = [[*ALIKE, shown(number, 4), traced_at(of_ranks[0])], [*ALIKE, traced_at(of_ranks[1])]]
    single = rank([*ALONE, shown(of_single, 4), traced_at(alone)], 0, 1)
    (finding,) = judge_view(of_two(entries[0], entries[1], single, single))
    assert finding.severity is Severity.WARNING and finding.location == Location("train.py", line)
    assert f"{number}, printed after 4 steps, is {float(of_single):g} in a single process" in finding.message


def test_an_early_end_has_the_line_of_the_number_that_decides_it() -> None:
    first, second = [*ALIKE, traced_at("20 value 0.3, 31 best 0.3")], [*ALIKE, traced_at("20 value 0.5")]
    single = rank([*ALONE, traced_at("20 value 0.4, 31 best 0.4")], 0, 1, made=6)
    assert_says(judge_view(of_two(first, second, single)), "at train.py:20 ... make 4 optimizer steps")


def test_only_findings_that_may_explain_a_difference_stand_for_it() -> None:
    def finding(code: str, severity: Severity = Severity.WARNING) -> Finding:
        return Finding(code, ("x",), "", severity=severity)

    others = [*map(finding, ("DDP305", "DDP403", "DDP512", "DDP805")), finding("DDP101", Severity.NOTE)]
    assert codes_that_explain(finding("DDP314", Severity.ERROR), others) == ["DDP305"]
    assert codes_that_explain(finding("DDP314"), others) == ["DDP805"]
