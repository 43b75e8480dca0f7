"""Evaluations and gathered targets of a script, judged on evidence made by hand: a fault and its healthy twin each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock, patch

import numpy
import pytest
import torch

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    GatheredTargets,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass, LossDifferentiated
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.data.datasets import SampleRows
from ddpcheck.record.evaluation import evaluation_recorder
from ddpcheck.record.evaluation.evaluation_recorder import (
    ComparisonRecorder,
    EvaluationRecorder,
    _row_labels,
    _row_values,
    _without_states,
)
from ddpcheck.record.source.program_numbers import columns_of, labels_in, labels_of_program, number_of
from ddpcheck.rules.evaluation.ddp804_targets_without_offset import judge_targets
from ddpcheck.rules.registry import judge_view
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import OF_NUMBERS, OF_SCORES, evaluations_of
from tests.reports import assert_says, codes

LOOP, LINE, REDUCE = Location("train.py", 30), Location("train.py", 34), Location("train.py", 33)


def judge_evaluations(loaders: Any, passes: Any, given: Any, shown: Any, compared: Any = ()) -> list[Finding]:
    return judge_view(Evaluations(evaluations_of(loaders, passes, given, shown, compared), loaders, shown))


def judged(indices: Any, *, numbers: Any = ({}, {}), own: Any = ({}, {}), **more: Any) -> list[Finding]:
    """The findings on a pass of each rank; `own` and `more` are fields of the `LoaderPass` of each rank and of all."""
    given, shown = (more.pop(name, ((), ())) for name in ("given", "shown"))
    references, numbers_of = (more.pop(name, {}) for name in ("references", "numbers_of"))
    compared = more.pop("compared", ())
    more = {"size": 8, "batch_size": 4, "batches": 2, "exhausted": True, **more}
    ranks = zip(indices, own, strict=True)
    loaders = [[LoaderPass(3, 0, LOOP, "Photos", indices=rank, **more | fields)] for rank, fields in ranks]
    known = {"numbers_of": numbers_of}
    passes = [[EvaluationPass(0, 3, 0, local, references, {"evaluate": LINE}, **known)] for local in numbers]
    return judge_evaluations(loaders, passes, given, shown, compared)


def call(*numbers: float, operation: str = "all_reduce", rows: Sequence[int] = (), **more: Any) -> ResultExchanged:
    return ResultExchanged(0, operation, REDUCE, more.pop("during", False), numbers=numbers, rows=rows, **more)


def prints(*values: float, text: str = "", how: str = "printed") -> list[MetricShown]:
    return [MetricShown(0, how, LINE, tuple(ShownNumber(text, (value,)) for value in values))]


def strided(size: int, *, pad: bool = True) -> list[list[int]]:
    """What a `DistributedSampler` gives two ranks."""
    indices = [*range(size), *range(size % 2 if pad else 0)]
    return [indices[0::2], indices[1::2]]


def evaluated_on_rank_0(
    *, theirs: Sequence[LoaderPass] = (), replicas: int = 2, size: int = 41, mean: float = 0.5625, how: str = "printed"
) -> list[Finding]:
    """Rank 0 evaluates 21 of the samples, and shows a mean."""
    loader = LoaderPass(3, 0, LOOP, "Photos", size, indices=strided(41)[0], exhausted=True, replicas=replicas)
    evaluation = EvaluationPass(0, 3, 0, {"evaluate.total": 21 * 0.5625}, {}, {"evaluate": LINE})
    return judge_evaluations([[loader], theirs], [[evaluation], []], [[], []], [prints(mean, how=how), []])


def test_one_rank_alone_evaluates_its_share_and_no_rank_the_others() -> None:
    assert_says(evaluated_on_rank_0(how="decides"), "DDP802 ... ('total',) of ranks (0,) at train.py:30 ... decides")
    theirs = LoaderPass(4, 0, LINE, "Photos", 41, indices=strided(41)[1], replicas=2)  # from another line
    assert not evaluated_on_rank_0(theirs=[theirs])
    assert not evaluated_on_rank_0(replicas=1)
    assert not evaluated_on_rank_0(size=21)
    assert not evaluated_on_rank_0(mean=0.8)  # something else is shown
    assert evaluated_on_rank_0(theirs=[replace(theirs, trains=True)])
    assert evaluated_on_rank_0(theirs=[replace(theirs, dataset="Others")])


# Samples that count twice


PAIRS = [[call(5), call(3, 2.5)], [call(5), call(4, 2.5)]]
"""A line reduces a number and then a pair."""
BATCHES = [[call(2, 4, during=True), call(1, 1, during=True)], [call(3, 4, during=True), call(0, 1, during=True)]]
COUNTED = [[call(3, 5)], [call(4, 5)]]
PER_CENT = [[call(60.0, operation="all_gather")], [call(80.0, operation="all_gather")]]
LOCAL = {"numbers": [{"evaluate.correct": correct, "evaluate.sum(table)": 5.0} for correct in (3.0, 4.0)]}
TWICE = "DDP801 ... ('Photos',) ... over 10 samples, and the ranks have 9 different ones: 1 sample counts twice"


@pytest.mark.parametrize(
    ("size", "given", "more", "words"),
    [
        (9, COUNTED, LOCAL, TWICE),  # a counter beside the number of correct ones
        (9, [[call(total=5)]] * 2, LOCAL, TWICE),  # a confusion matrix
        (9, PER_CENT, LOCAL, TWICE),
        (9, BATCHES, {}, "DDP801"),
        (9, PAIRS, {"numbers": [{"evaluate.loss": 2.5}] * 2}, "DDP801"),
        (9, PAIRS, {}, ""),  # 5 may be the number of anything
        (601, [[call(301.0)], [call(301.0)]], {}, "DDP801"),
        (9, [[call(3, 5)], [call(4, 4)]], {}, ""),  # each rank leaves out what is there twice
        (8, [[call(3, 4)], [call(4, 4)]], {}, ""),  # samples are there once
        (9, COUNTED, {"replaces": True}, ""),
        (9, COUNTED, {"own": [{"contents": {"0": {0: sample}}} for sample in (7, 8)]}, ""),  # two samples of an index
    ],
)
def test_samples_are_counted_if_a_reduction_counts_them(size: int, given: Any, more: Any, words: str) -> None:
    assert_says(judged(strided(size), size=size, given=given, **more), words)


def test_gathered_rows_count_twice_unless_they_are_cut() -> None:
    def shows(*numbers: float, gathers: Any = None, **more: Any) -> list[str]:
        return codes(judged(strided(9), size=9, given=gathers or labels, shown=[prints(*numbers), []], **more))

    labels = [  # index 0 is there twice, and right both times
        [call(operation="all_gather", rows=[0, 0, 0, 0, 0]), call(operation="all_gather", rows=rows)]
        for rows in ([0, 1, 2, 3, 0], [1, 2, 3, 0, 0])
    ]
    assert shows(4 / 10) == ["DDP801"] and shows(3 / 9) == []
    labels[1][1] = replace(labels[1][1], rows=[1, 2, 3, 0, 1])  # index 0 is right the first time only
    assert shows(3 / 10) == ["DDP801"] and shows(3 / 10, 3 / 9) == shows(3 / 10, 2 / 9) == []
    gathers = [[call(operation="all_gather", during=True)]] * 2
    numbers = [{"evaluate.total": 10.0, "evaluate.correct": 7.0}] * 2
    assert [shows(value, numbers=numbers, gathers=gathers) for value in (0.7, 7 / 9)] == [["DDP801"], []]
    losses = [[call(operation="all_gather", rows=[0] * 5, values=[0.1 * n for n in rank])] for rank in strided(9)]
    assert shows(3.6 / 10, gathers=losses) == ["DDP801"] and shows(3.6 / 9, gathers=losses) == []


# Metrics of one rank


OWN = [{"evaluate.correct": 300.0}, {"evaluate.correct": 200.0}]
ADDED_UP = [{"evaluate.correct": c, "evaluate.total": n} for c, n in ((500.0, 800.0), (200.0, 400.0))]
LEFT_THERE = [[call(c, 400.0, operation="reduce", during=True, sums=True)] for c in (300.0, 200.0)]
"""Rank 0 adds up what `reduce` leaves there."""


def test_what_one_rank_shows_of_its_own_samples_is_reported() -> None:
    findings = judged(strided(800), size=800, numbers=OWN, shown=[prints(0.75, how="decides"), []])
    words = "('correct',) of ranks (0,) at train.py:34 ... 0.75 ... rank 1 has 0.5, and all ranks together have 0.625"
    assert_says(findings, f"DDP802 ... {words}")
    unused = [[call(correct, operation="reduce", during=True, sums=True)] for correct in (300.0, 200.0)]
    assert codes(judged(strided(800), size=800, numbers=OWN, given=unused, shown=[prints(0.75), []])) == ["DDP802"]


def test_a_mean_over_samples_that_rank_0_accumulates_from_reduced_batches_is_of_all() -> None:
    losses = ((1.5137, 3.0291), (2.5429, 4.0173))  # by rank and batch, of four and two samples
    reduced = [[call(x, operation="reduce", during=True, sums=True) for x in rank] for rank in losses]
    own = [4 * first + 2 * second for first, second in losses]
    for total, found in ((own[0], ["DDP802"]), (sum(own) / 2, [])):
        totals = [{"evaluate.total": total}, {"evaluate.total": own[1]}]
        assert (
            codes(judged(strided(12), size=12, numbers=totals, given=reduced, shown=[prints(total / 6), []])) == found
        )


def test_several_metrics_of_an_own_shard_are_one_finding_and_a_reduced_one_is_none_of_them() -> None:
    values = ((303.0, 130.3, 220.2), (200.0, 190.9, 290.9))
    own = [{"evaluate.correct": correct, "evaluate.total": t, "evaluate.margin": m} for correct, t, m in values]
    reduced = [[call(220.2)], [call(290.9)]]
    findings = judged(strided(800), size=800, numbers=own, given=reduced, shown=[prints(0.7575, 0.32575, 0.5505), []])
    assert_says(findings, "('correct', 'total') ... | also total: Rank 0 printed 0.32575")


@pytest.mark.parametrize("shown", [6100 / 3900, math.exp(6100 / 3900)], ids=["a token", "perplexity"])
def test_what_is_divided_by_another_number_of_the_same_function_is_a_metric(shown: float) -> None:
    def of_numbers(rank_0: dict[str, float], rank_1: dict[str, float], printed: float = shown) -> list[Finding]:
        return judged(strided(800), size=800, numbers=[rank_0, rank_1], shown=[prints(printed), []])

    tokens = {"evaluate.nll": 6100.0, "evaluate.tokens": 3900.0}, {"evaluate.nll": 9000.0, "evaluate.tokens": 5000.0}
    assert_says(of_numbers(*tokens), "DDP802 ... ('nll',) of ranks (0,)")
    assert not of_numbers(*tokens, 151 / 89)  # of all
    assert not of_numbers(*({"train.nll" if "nll" in name else name: rank[name] for name in rank} for rank in tokens))
    half = ({**rank, "evaluate.nll": nll} for rank, nll in zip(tokens, (1950.0, 1000.0), strict=True))
    assert not of_numbers(*half, 50.0)  # other numbers may give it, too


PASS = LoaderPass(3, 0, LOOP, "Photos", 8, indices=[0, 2, 4, 6], batch_size=4, batches=1, exhausted=True)


def recorder_of_nothing() -> tuple[EvaluationRecorder, list[Any]]:
    """A recorder that has patched nothing, and what it writes down."""
    written: list[Any] = []
    with patch.object(evaluation_recorder, "patched", lambda *_: None):
        return EvaluationRecorder(written.append), written


def numbers_of_function(counts: Any, added: Sequence[Any]) -> dict[str, float]:
    """The numbers that are written down of a function which adds to `counts` in a pass over a loader."""
    recorder, written = recorder_of_nothing()
    loader = replace(PASS, batch_size=400)

    def evaluate() -> None:
        recorder.note_pass(loader, None)
        for place in range(len(added)):
            counts[place] += added[place]
        recorder.note_pass(loader, None)

    evaluate()
    numbers = written[-1].numbers
    return {name: numbers[name] for name in numbers if name.startswith("evaluate.") and "counts" in name}


@pytest.mark.parametrize("zeros", [lambda: torch.zeros(2), lambda: numpy.zeros(2), lambda: [torch.tensor(0), 0]])
def test_counts_that_are_kept_together_are_told_apart(zeros: Any) -> None:
    own = [numbers_of_function(zeros(), added) for added in ((500, 700), (600, 900))]
    numbers = {"evaluate.counts[0]": 500.0, "evaluate.counts[1]": 700.0, "evaluate.sum(counts)": 1200.0}
    assert own[0].items() >= numbers.items()
    shown = [prints(float(torch.tensor(5) / 7)), []]  # a quotient of float32
    assert_says(judged(strided(800), size=800, numbers=own, shown=shown), "DDP802 ... ('counts[0]',) of ranks (0,)")
    renamed = [{name.replace("counts[0]", "hits[0]"): rank[name] for name in rank} for rank in own]
    assert judged(strided(800), size=800, numbers=renamed, shown=shown) == []
    reduced = [[call(500.0, 700.0)], [call(600.0, 900.0)]]
    assert judged(strided(800), size=800, numbers=own, given=reduced, shown=[prints(11 / 16), []]) == []
    assert judged([range(400), range(400)], size=400, numbers=own, shown=shown) == []  # each rank evaluates all


def test_a_table_of_counts_has_a_diagonal() -> None:
    tables = [[[301.0, 100.0], [100.0, 600.0]], [[400.0, 100.0], [200.0, 600.0]]]
    own = [numbers_of_function(torch.zeros(2, 2), list(map(torch.tensor, table))) for table in tables]
    assert own[0] == {"evaluate.sum(counts)": 1101.0, "evaluate.trace(counts)": 901.0}
    findings = judged(strided(800), size=800, numbers=own, shown=[prints(901 / 1101), []])
    assert_says(findings, "DDP802 ... ('trace(counts)',)")
    assert judged(strided(800), size=800, numbers=own, shown=[prints(1901 / 2401), []]) == []  # of all


def test_counts_of_classes_are_one_sum_and_what_begins_otherwise_is_no_counter() -> None:
    for added, places in (((3, 1, 4), 3), ((3, 1, 2, 2), 0), ((3, 1, 2, 4), 4)):  # of classes, and all samples
        names = numbers_of_function(torch.zeros(len(added)), added)
        assert sum(name.endswith("]") for name in names) == places
    assert numbers_of_function(torch.tensor([1.0, 0.0]), (5, 7)) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"shown": [prints(0.75), prints(0.5)]},  # each rank tells its own
        {"shown": [prints(0.75, 0.5), []]},  # one rank tells those of all
        {"shown": [prints(0.625), []]},  # that of all
        {"shown": [prints(0.75, 0.625), []]},  # both
        {"shown": [prints(0.75), []], "given": [[call(300.0)], [call(200.0)]]},  # which is reduced
        {"shown": [prints(0.75), []], "numbers": [OWN[0], {}]},
        {"shown": [prints(0.75), []], "numbers": [OWN[0], OWN[0]]},  # the same on all ranks
        {"shown": [prints(0.625), []], "numbers": ADDED_UP, "given": LEFT_THERE},
    ],
)
def test_a_metric_that_is_of_all_or_of_nobody_is_not_reported(more: dict[str, Any]) -> None:
    assert judged(strided(800), **{"size": 800, "numbers": OWN, **more}) == []


# Order


LABELS = [0, 1, 2, 3, 0, 1, 2, 3]
RIGHT = [[0, 2, 0, 2], [1, 3, 1, 3]]  # of all samples, by rank


def test_results_in_the_order_of_the_ranks_are_compared_with_labels_in_another() -> None:
    given = [[call(operation="all_gather", rows=of)] for of in RIGHT]
    compared = {"size": 8, "given": given, "references": {"labels": LABELS}}
    words = "DDP803 ... at train.py:33 ... the 0.25 that is printed would be 1"
    assert_says(judged(strided(8), shown=[prints(2 / 8), []], **compared), words)
    assert judged(strided(8), shown=[prints(1.0), []], **compared) == []
    blocks = [range(4), range(4, 8)]  # in which gathering keeps the order
    assert judged(blocks, shown=[prints(2 / 8), []], **compared) == []


def test_labels_that_the_dataset_does_not_hold_are_those_that_came_with_the_samples() -> None:
    given = [[call(operation="all_gather_object", rows=of)] for of in RIGHT]
    own = [{"classes": [LABELS[index] for index in of_rank]} for of_rank in strided(8)]
    assert codes(judged(strided(8), own=own, given=given, shown=[prints(0.25), []])) == ["DDP803"]
    assert judged(strided(8), own=own, given=given, shown=[prints(0.251, text="0.251"), []]) == []
    beneath = [[100 + index for index in of_rank] for of_rank in strided(8)]  # of a `Subset`
    of_subset = judged(beneath, subset=range(100, 108), own=own, given=given, shown=[prints(0.25), []])
    assert codes(of_subset) == ["DDP803"]
    both = [[*of, call(operation="all_gather_object", rows=of[0].rows)] for of in given]
    assert judged(strided(8), own=own, given=both, shown=[prints(0.25), []]) == []  # the labels are gathered, too


TARGETS = [0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 3.0, 0.0]
PREDICTED = [0.6, -0.8, 1.7, 0.3, 1.1, -0.7, 2.5, 0.4]  # of each sample
OF_RANKS = [[PREDICTED[index] for index in of_rank] for of_rank in strided(8)]
JOINED = [*OF_RANKS[0], *OF_RANKS[1]]
TARGETS_OF_RANKS = [[TARGETS[index] for index in of_rank] for of_rank in strided(8)]
GATHERED = [[call(operation="all_gather", rows=[int(v > 0) for v in of], values=of)] for of in OF_RANKS]


def errors(predicted: Sequence[float]) -> list[float]:
    return [abs(p - t) for p, t in zip(predicted, TARGETS, strict=True)]


def test_targets_are_compared_with_what_was_gathered_rank_by_rank() -> None:
    wrong, right = (sum(error**2 for error in errors(order)) / 8 for order in (JOINED, PREDICTED))

    def found(*values: float, text: str = "", given: Any = GATHERED) -> list[str]:
        shown = [prints(*values, text=text), []]
        return codes(judged(strided(8), numbers_of={"prices": TARGETS}, given=given, shown=shown))

    assert found(wrong) == ["DDP803"]
    assert found(right) == found(wrong, right) == found(wrong + 0.1) == []
    digits = f"{wrong:.2f}"
    assert found(float(digits), text=digits) == []  # any number may be printed so
    targets = [call(operation="all_gather", rows=[0] * 4, values=of) for of in TARGETS_OF_RANKS]
    both = [[*of, own] for of, own in zip(GATHERED, targets, strict=True)]
    assert found(wrong, given=both) == ["DDP803"] and found(right, given=both) == []


def test_targets_are_those_that_come_with_the_samples_too() -> None:
    own = [{"targets": targets} for targets in TARGETS_OF_RANKS]
    findings = judged(strided(8), own=own, given=GATHERED, shown=[prints(max(errors(JOINED))), []])
    assert_says(findings, "DDP803 ... at train.py:33 ... the largest error")


def test_results_and_targets_that_a_script_compares_in_two_orders() -> None:
    def found(results: Sequence[float], targets: Sequence[float], *, number: int = 0) -> list[str]:
        compared = [[RowsCompared(number, LINE, results, targets)], []]
        return codes(judged(strided(8), numbers_of={"prices": TARGETS}, given=GATHERED, compared=compared))

    assert found(JOINED, TARGETS) == found(TARGETS, JOINED) == ["DDP803"]
    assert found([3 * x + 1 for x in JOINED], [3 * x + 1 for x in TARGETS]) == ["DDP803"]
    in_order = [*TARGETS_OF_RANKS[0], *TARGETS_OF_RANKS[1]]
    assert found(PREDICTED, TARGETS) == found(JOINED, in_order) == found(JOINED, PREDICTED) == []
    assert found(JOINED, TARGETS[:7]) == found([0.0] * 8, TARGETS) == found(JOINED, TARGETS, number=1) == []


def test_comparisons_are_followed_from_a_gather_to_the_next_loop() -> None:
    seen: list[RowsCompared] = []
    recorder = ComparisonRecorder(seen.append)
    row, column = torch.arange(8.0), torch.ones(8, 1)
    plain = vars(torch.Tensor).get("__sub__")
    recorder.open(2, 8)
    try:
        for _ in range(2):
            (row[:, None] - column).square().mean()  # recorded once for each line
        torch.nn.HuberLoss()(row, row + 1)
        assert (row == 3).sum() == 1 and (row[:4] - row[4:]).abs().sum() == 16  # no pairs, or too few
    finally:
        recorder.close()
    assert row.sub(row + 2).sum() == -16 and vars(torch.Tensor).get("__sub__") is plain
    pairs = [(pair.round, [*map(int, pair.first)], [*map(int, pair.second)]) for pair in seen]
    assert pairs == [(2, [*range(8)], [1] * 8), (2, [*range(8)], [*range(1, 9)])]


def test_metrics_of_pairs() -> None:
    pairs = [((p,), (t,)) for p, t in zip(PREDICTED, TARGETS, strict=True)]
    p, t = torch.tensor(PREDICTED).double(), torch.tensor(TARGETS).double()
    expected = {
        "smooth L1 loss": torch.nn.functional.smooth_l1_loss(p, t),
        "median absolute error": (p - t).abs().median(),
        "coefficient of determination": 1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(),
        "explained variance": 1 - (p - t).var() / t.var(),
        "correlation": torch.corrcoef(torch.stack([p, t]))[0, 1],
        "rank correlation": torch.corrcoef(torch.stack([p.argsort().argsort(), t.argsort().argsort()]).double())[0, 1],
        "cosine similarity": torch.nn.functional.cosine_similarity(p, t, dim=0),
    }
    assert all(OF_NUMBERS[name](pairs) == pytest.approx(float(expected[name]), rel=1e-6) for name in expected)
    scores = [((0.9,), (1.0,)), ((0.4,), (0.0,)), ((0.4,), (1.0,)), ((0.1,), (0.0,))]
    assert OF_SCORES["area under the curve"](scores) == 0.875
    undefined = [((math.nan,), (1.0,)), ((2.0,), (0.0,))]
    assert math.isnan(OF_NUMBERS["correlation"](pairs[:1])) and math.isnan(OF_NUMBERS["rank correlation"](undefined))
    assert math.isnan(OF_SCORES["area under the curve"](scores + undefined))


@pytest.mark.parametrize(
    ("read", "gathered", "expected"),
    [
        (_row_values, [[0.5], [1.5, 2.5]], [0.5, 1.5, 2.5]),
        (_row_values, torch.ones(2, 9), []),  # scores of classes, or pictures
        (_row_values, {"loss": 0.5}, []),
        (_row_labels, [torch.tensor([1, 0]).numpy(), torch.tensor([2]).numpy()], [1, 0, 2]),
        (_row_labels, torch.tensor([[-2.0], [0.2]]), [0, 1]),
        (_row_labels, [0.2, 0.9], [0, 1]),
        (_row_labels, ["a", "b"], []),
    ],
)
def test_what_is_gathered_has_a_number_or_a_label_for_each_row(read: Any, gathered: Any, expected: Any) -> None:
    assert list(read(gathered)) == expected


def test_rows_that_are_gathered_batch_by_batch_are_joined_rank_by_rank_or_call_by_call() -> None:
    rows = [[0, 2, 2, 3], [1, 3, 1, 1]]  # right: 5 of 8
    halves = [[call(operation="all_gather", rows=h, during=True) for h in (of[:2], of[2:])] for of in rows]
    for value, code in ((0.25, "DDP803"), (0.375, "DDP803"), (0.875, "")):  # by rank, by call
        findings = judged(strided(8), given=halves, references={"labels": LABELS}, shown=[prints(value), []])
        assert_says(findings, code)


def gathered_in_turn(predicted: Sequence[int], labels: Sequence[int], indices: Sequence[Sequence[int]]) -> Any:
    """Predictions and labels of each batch of four, gathered in one line; the loader fetches a batch ahead."""
    return [
        [
            call(operation="all_gather", rows=[of[x] for x in batch], during=first, evaluation=(3, 0))
            for batch, first in ((of_rank[:4], True), (of_rank[4:], False))
            for of in (predicted, labels)
        ]
        for of_rank in indices
    ]


def test_predictions_and_labels_that_one_line_gathers_in_turn_are_two_things() -> None:
    indices = [[0, 1, 2, 3, 8, 0, 1, 2], [4, 5, 6, 7, 3, 4, 5, 6]]  # 9 samples; the last batches are completed
    labels, predicted = [0, 1, 2, 3, 0, 1, 2, 3, 0], [0, 1, 2, 0, 0, 0, 0, 0, 0]
    gathers = gathered_in_turn(predicted, labels, indices)
    own: dict[str, Any] = {"size": 9, "given": gathers, "references": {"labels": labels}}
    assert judged(indices, shown=[prints(5 / 9), []], **own) == []
    sums = [[replace(item, total=4.0, numbers=(2.0,) * 4) for item in of_rank] for of_rank in gathers]
    assert judged(indices, size=9, given=sums) == []  # labels whose sum is by chance the number of samples
    twice = sum(labels[x] == predicted[x] for of_rank in indices for x in of_rank) / 16
    assert codes(judged(indices, shown=[prints(twice), []], **own)) == ["DDP801"]
    of_another = [[replace(item, evaluation=(4, 0)) for item in of_rank] for of_rank in gathers]
    assert judged(indices, size=9, given=of_another, shown=[prints(twice), []]) == []


def test_labels_are_kept_as_a_loader_gives_them() -> None:
    images = torch.randn(2, 3)
    for batch, classes in (
        ((images, torch.tensor([4, 5])), [4, 5]),
        ({"x": images, "y": torch.tensor([1.0, 0.0])}, [1, 0]),
        ((images, torch.tensor([1.0, float("inf")])), []),
        ((images, torch.tensor([1, 2]), torch.tensor([3, 4])), []),
    ):
        rows = SampleRows()
        rows.note(batch, 2)
        assert list(rows.classes) == classes


# Means of means


UNEVEN = [[0, 1, 2, 3, 4, 5], [6, 7]]
LOSSES = [{"evaluate.total": 3.06}, {"evaluate.total": 2.02}]  # 0.51 and 1.01 a sample; 0.635 over all of them


def means_of(first: float, second: float) -> dict[str, Any]:
    """Arguments of `judged`: numbers that two ranks reduce, and their mean, which rank 0 prints."""
    return {"numbers": LOSSES, "given": [[call(first)], [call(second)]], "shown": [prints((first + second) / 2), []]}


def test_the_mean_of_means_of_more_and_fewer_samples_is_reported() -> None:
    for first, second, right in ((0.51, 1.01, "0.6"), (1.53, 1.01, "1.4")):  # by samples, by batches
        means: Any = means_of(first, second)
        words = f"DDP805 ... at train.py:33 ... 2 to 6 samples ... over all samples it is {right}"
        assert_says(judged(UNEVEN, **means), words)
        assert_says(judged(UNEVEN, own=[{"size": len(part), "subset": part} for part in UNEVEN], **means), "DDP805")


@pytest.mark.parametrize(
    "more",
    [
        {"shown": [prints(0.635), []]},  # weighted
        {"given": [[call(0.4)], [call(1.1)]]},  # another number
        {"indices": [range(4), range(4, 8)], "numbers": [{"evaluate.total": 2.0}, {"evaluate.total": 4.0}]},
        means_of(0.5, 0.505) | {"numbers": [{"evaluate.total": 3.0}, {"evaluate.total": 1.01}]},  # nearly the right one
        {"shown": [prints(0.76, 0.635), []]},
    ],
)
def test_means_that_weigh_alike_are_not_reported(more: dict[str, Any]) -> None:
    means = means_of(0.51, 1.01) | more
    assert judged(means.pop("indices", UNEVEN), **means) == []


# Targets


def use(own: int, targets: Sequence[int], *, step: int = 0) -> GatheredTargets:
    return GatheredTargets(step, LINE, (0, 1), own, 4, 8, tuple(targets))


def judged_targets(uses: Any, losses: Any = ((), ())) -> list[Finding]:
    return list(judge_targets(Evaluations(targets=uses, losses=losses)))


def test_targets_that_name_the_rows_of_rank_0_on_every_rank_are_reported() -> None:
    uses = [[use(0, range(4))], [use(4, range(4))]]
    assert_says(judged_targets(uses), "DDP804 ... of ranks (1,) at train.py:34")
    of_loss = [[LossDifferentiated(0, 0, (), None, REDUCE)]] * 2
    words = "at train.py:33 ... | gathered at train.py:34 ... those of rank 1 begin at 4"
    assert_says(judged_targets(uses, of_loss), words)
    in_loop = [[replace(one, loss=LOOP) for one in of_rank] for of_rank in uses]
    assert_says(judged_targets(in_loop, of_loss), "at train.py:30")


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "code"),
    [
        (use(0, range(4, 8)), use(4, range(4, 8)), "DDP804"),  # an offset, and a wrong one
        (use(0, range(4)), use(4, range(2)), ""),  # chosen in some way
        (use(0, range(4)), use(4, range(4, 8)), ""),  # with the offset
        (use(0, range(4)), use(0, range(4)), ""),  # each rank puts its own first
        (use(0, range(8)), use(4, range(8)), ""),  # all of the rows on both sides
        (use(0, range(4)), use(4, range(4), step=1), ""),
    ],
)
def test_targets_that_name_own_rows_are_right(of_rank_0: Any, of_rank_1: Any, code: str) -> None:
    assert_says(judged_targets([[of_rank_0], [of_rank_1]]), code)


# What the program holds


def test_numbers_and_labels_are_read_as_they_are_held() -> None:
    assert [number_of(v) for v in (3, 0.5, torch.tensor([2]))] == [3.0, 0.5, 2.0]
    assert all(number_of(v) is None for v in (True, "3", float("nan"), torch.zeros(2)))
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    for values in (torch.tensor([1, 0]), [1, 0], [logits[:1], logits[1:]], [torch.tensor([1]), torch.tensor([0])]):
        assert labels_in(values, 2).tolist() == [1, 0]  # type: ignore[union-attr]
    for values in (torch.tensor(1), [torch.tensor(0)], torch.zeros(2), "ab", [0.5, 1.0], torch.zeros(2, 2, 2), [1]):
        assert labels_in(values, 2) is None
    results = [(7, 1, 0), (8, 0, 0), (9, 0, 1)]  # the number of a sample, what was predicted, and its label
    columns = {name.partition(".")[2]: labels.tolist() for name, labels in labels_of_program(len(results)).items()}
    assert columns == {"results[1]": [1, 0, 0], "results[2]": [0, 0, 1]}


def test_the_columns_of_gathered_rows() -> None:
    for value, columns in (
        ([{"file": "a", "p": 1}, {"file": "b", "p": 2}, {"file": "c", "p": 0}], [[1, 2, 0]]),
        (torch.tensor([[0.1, 0.5], [0.3, 0.2], [0.4, 0.6]]), []),  # scores of classes
        ([[1, 0, 2, 2], [0, 1, 1, 1]], []),  # two batches of predictions: no row for each of three samples
        ([(1, 0), (2,), (0, 1)], []),
    ):
        assert [list(map(float, column)) for column in columns_of(value, 3)] == columns


def test_gathered_rows_of_predictions_and_labels_say_what_each_was() -> None:
    recorder, exchanged = recorder_of_nothing()
    recorder._comparisons = Mock()
    recorder._evaluated, recorder._remaining, recorder._samples = True, [8, 8], 3
    rows = [(1, 0), (2, 2), (0, 1)]
    recorder.note_collective(Call("all_gather_object", "train.py:9", (0, 1)), {"obj": rows})
    assert [one.rows for one in exchanged if one.rows] == [(1, 2, 0), (0, 2, 1)]


def test_what_a_loop_counts_of_a_batch_that_was_fetched_ahead() -> None:
    recorder, written = recorder_of_nothing()

    def batches() -> Iterator[int]:
        recorder.note_pass(PASS, None)
        recorder.note_pass(PASS, None)
        yield 3

    def evaluate() -> None:
        counted = 0
        for right in batches():
            counted += right
        recorder._note_print(f"accuracy {counted / 4:.4f}")

    evaluate()
    *_, last = (one for one in written if isinstance(one, EvaluationPass))
    assert last.numbers["evaluate.counted"] == 3.0


def test_what_is_shown_in_the_loop_of_the_next_evaluation_is_how_far_that_is() -> None:
    recorder, written = recorder_of_nothing()
    for number in range(5):  # of which the last ones are not followed
        loader = replace(PASS, number=number, indices=(), batch_size=1)
        recorder.note_pass(loader, None)
        recorder._note_print("of a batch: 12.5")
        recorder.note_pass(loader, None)
        recorder._note_print("12.25")
    shown = [number.text for one in written if isinstance(one, MetricShown) for number in one.numbers]
    assert shown == ["12.25"] * 3


@pytest.mark.parametrize(
    ("indices", "subsets", "expected"),
    [
        ([[3, 7], [3, 13]], [[3, 5, 7, 9], [5, 3, 11, 13]], []),  # places that a sampler gives, all different
        ([[3, 7], [5, 3]], [[3, 5, 7], [3, 5, 7]], ["DDP801"]),  # it repeats one
    ],
)
def test_samples_in_the_splits_of_two_ranks_are_no_padding(indices: Any, subsets: Any, expected: list[str]) -> None:
    own = [{"size": len(part), "subset": tuple(part), "batches": 1, "batch_size": 2} for part in subsets]
    counted = [{"evaluate.count": 2.0}] * 2
    assert codes(judged(indices, own=own, numbers=counted, given=[[call(2.0)]] * 2)) == expected


def test_what_is_saved_of_optimizers_schedules_and_scalers_is_no_result() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "best": {"accuracy": 0.75},
    }
    assert [leaf for leaf in tree_leaves(_without_states(held)) if type(leaf) is float] == [0.75]
