"""Evaluations and gathered targets of a script, judged on evidence made by hand: a fault and its healthy twin each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    _rows_given,
    _values_given,
    _without_states,
)
from ddpcheck.record.loss.gather_recorder import _cross_entropies, _first_column_of
from ddpcheck.record.source.program_numbers import array_of, columns_of, labels_in, number_of, rows_of_program
from ddpcheck.rules.evaluation.ddp804_targets_without_offset import judge_targets
from ddpcheck.rules.registry import judge_view
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import OF_NUMBERS, OF_SCORES, evaluations_of
from tests.reports import codes

LOOP, LINE, REDUCE = Location("train.py", 30), Location("train.py", 34), Location("train.py", 33)


def judge_evaluations(
    loaders: Sequence[Sequence[LoaderPass]],
    passes: Sequence[Sequence[EvaluationPass]],
    given: Sequence[Sequence[ResultExchanged]],
    shown: Sequence[Sequence[MetricShown]],
    compared: Sequence[Sequence[RowsCompared]] = (),
) -> list[Finding]:
    return judge_view(Evaluations(evaluations_of(loaders, passes, given, shown, compared), loaders, shown))


def judged(
    indices: Sequence[Sequence[int]],
    *,
    size: int,
    numbers: Sequence[dict[str, float]] = ({}, {}),
    given: Sequence[Sequence[ResultExchanged]] = ((), ()),
    shown: Sequence[Sequence[MetricShown]] = ((), ()),
    references: dict[str, list[int]] | None = None,
    **more: Any,
) -> list[Finding]:
    more = {"batch_size": 4, "batches": 2, "exhausted": True, **more}
    loaders = [[LoaderPass(3, 0, LOOP, "Photos", size, indices=of_rank, **more)] for of_rank in indices]
    passes = [[EvaluationPass(0, 3, 0, held, references or {}, {"evaluate": LINE})] for held in numbers]
    return judge_evaluations(loaders, passes, given, shown)


def call(*numbers: float, operation: str = "all_reduce", rows: Sequence[int] = (), **more: Any) -> ResultExchanged:
    return ResultExchanged(0, operation, REDUCE, more.pop("during", False), numbers=numbers, rows=rows, **more)


def prints(*values: float, text: str = "", how: str = "printed") -> list[MetricShown]:
    return [MetricShown(0, how, LINE, tuple(ShownNumber(text, (value,)) for value in values))]


def strided(size: int, *, pad: bool = True) -> list[list[int]]:
    """What a `DistributedSampler` gives two ranks."""
    indices = [*range(size), *range(size % 2 if pad else 0)]
    return [indices[0::2], indices[1::2]]


def lone(
    *, others: Sequence[LoaderPass] = (), replicas: int = 2, of: int = 41, mean: float = 0.5625, how: str = "printed"
) -> list[Finding]:
    """Rank 0 alone evaluates 21 of the samples, and shows a mean."""
    loader = LoaderPass(3, 0, LOOP, "Photos", of, indices=strided(41)[0], exhausted=True, batches=3, replicas=replicas)
    held = EvaluationPass(0, 3, 0, {"evaluate.total": 21 * 0.5625}, {}, {"evaluate": LINE})
    return judge_evaluations([[loader], others], [[held], []], [[], []], [prints(mean, how=how), []])


@pytest.mark.parametrize("how", ["printed", "broadcast", "decides"])
def test_one_rank_alone_evaluates_its_share(how: str) -> None:
    (found,) = lone(how=how)
    assert (found.code, found.subjects, found.ranks, found.location) == ("DDP802", ("total",), (0,), LOOP)
    assert how in found.evidence[0]


def test_one_rank_alone_evaluates_what_is_no_share_or_others_evaluate_theirs() -> None:
    theirs = LoaderPass(4, 0, LINE, "Photos", 41, indices=strided(41)[1], replicas=2)  # from another line
    assert not lone(others=[theirs])
    assert not lone(replicas=0)
    assert not lone(replicas=1)
    assert not lone(of=21)
    assert not lone(mean=0.8)  # something else is shown
    assert lone(others=[replace(theirs, trains=True)])
    assert lone(others=[replace(theirs, dataset="Others")])


# Samples that count twice


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1"),
    [
        (call(3, 5), call(4, 5)),  # a counter beside the number of correct ones
        (call(total=5), call(total=5)),  # a confusion matrix
        (call(0.6), call(0.8)),  # a mean of each rank
        (call(60.0, operation="all_gather"), call(80.0, operation="all_gather")),  # in per cent
    ],
)
def test_samples_that_a_sampler_repeats_are_counted(of_rank_0: ResultExchanged, of_rank_1: ResultExchanged) -> None:
    held = [
        {"evaluate.correct": 3.0, "evaluate.sum(table)": 5.0},
        {"evaluate.correct": 4.0, "evaluate.sum(table)": 5.0},
    ]
    (found,) = judged(strided(9), size=9, numbers=held, given=[[of_rank_0], [of_rank_1]])
    assert (found.code, found.subjects) == ("DDP801", ("Photos",))
    assert "over 10 samples, and the ranks have 9 different ones: 1 sample counts twice" in found.message


def test_a_sum_over_batches_is_counted_too() -> None:
    batches = [[call(2, 4, during=True), call(1, 1, during=True)], [call(3, 4, during=True), call(0, 1, during=True)]]
    assert codes(judged(strided(9), size=9, given=batches)) == ["DDP801"]


def test_a_line_may_reduce_a_number_and_then_a_pair() -> None:
    calls = [[call(5), call(3, 2.5)], [call(5), call(4, 2.5)]]
    counted = [{"evaluate.loss": 2.5}, {"evaluate.loss": 2.5}]
    assert codes(judged(strided(9), size=9, given=calls, numbers=counted)) == ["DDP801"]
    assert judged(strided(9), size=9, given=calls) == []  # 5 may be the number of anything
    many = [[call(301.0)], [call(301.0)]]
    assert codes(judged(strided(601), size=601, given=many)) == ["DDP801"]


@pytest.mark.parametrize(
    "given",
    [
        ([call(3, 5)], [call(4, 4)]),  # each rank leaves out what is there twice
        ([call(3)], [call(4)]),  # of which it is not known
        ((), ()),
    ],
)
def test_what_is_not_known_to_be_counted_is_not_reported(given: Any) -> None:
    assert judged(strided(9), size=9, given=given) == []


def test_samples_that_are_there_once_or_on_every_rank_are_no_fault() -> None:
    given = [[call(3, 4)], [call(4, 4)]]
    assert judged(strided(8), size=8, given=given) == []
    assert judged([range(4), range(4)], size=4, given=given) == []  # each rank evaluates all of them
    assert judged(strided(9), size=9, given=[[call(3, 5)], [call(4, 5)]], replaces=True) == []
    other = [{"0": {0: 7}}, {"0": {0: 8}}]  # under one index, two samples
    loaders = [
        [LoaderPass(0, 0, LOOP, "Own", 9, exhausted=True, indices=i, contents=c)]
        for i, c in zip(strided(9), other, strict=True)
    ]
    passes = [[EvaluationPass(0, 0, 0)]] * 2
    assert judge_evaluations(loaders, passes, [[call(3, 5)], [call(4, 5)]], [[], []]) == []


def test_gathered_rows_count_twice_unless_they_are_cut() -> None:
    labels = [[0, 1, 2, 3, 0], [1, 2, 3, 0, 0]]  # index 0 is there twice, and right both times
    gathers = [
        [call(operation="all_gather", rows=[0, 0, 0, 0, 0]), call(operation="all_gather", rows=of)] for of in labels
    ]
    uncut = judged(strided(9), size=9, given=gathers, shown=[prints(4 / 10), []])
    assert codes(uncut) == ["DDP801"]
    assert judged(strided(9), size=9, given=gathers, shown=[prints(3 / 9), []]) == []
    gathers[1][1] = call(operation="all_gather", rows=[1, 2, 3, 0, 1])  # index 0 is right the first time only
    assert codes(judged(strided(9), size=9, given=gathers, shown=[prints(3 / 10), []])) == ["DDP801"]
    for right in (3 / 9, 2 / 9):
        assert judged(strided(9), size=9, given=gathers, shown=[prints(3 / 10, right), []]) == []
    counted = [{"evaluate.total": 10.0, "evaluate.correct": 7.0}] * 2
    during = [[call(operation="all_gather", during=True)]] * 2
    assert codes(judged(strided(9), size=9, numbers=counted, given=during, shown=[prints(0.7), []])) == ["DDP801"]
    assert judged(strided(9), size=9, numbers=counted, given=during, shown=[prints(7 / 9), []]) == []


# Metrics of one rank


OWN = [{"evaluate.correct": 300.0}, {"evaluate.correct": 200.0}]


@pytest.mark.parametrize("how", ["printed", "logged", "saved", "decides"])
def test_what_one_rank_shows_of_its_own_samples_is_reported(how: str) -> None:
    (found,) = judged(strided(800), size=800, numbers=OWN, shown=[prints(0.75, how=how), []])
    assert (found.code, found.subjects, found.ranks, found.location) == ("DDP802", ("correct",), (0,), LINE)
    assert "0.75" in found.message and "rank 1 has 0.5, and all ranks together have 0.625" in found.message


def test_a_rank_that_shows_the_metric_of_each_rank_is_silent() -> None:
    assert judged(strided(800), size=800, numbers=OWN, shown=[prints(0.75, 0.5), []]) == []


def test_several_metrics_of_an_own_shard_are_one_finding_and_a_reduced_one_is_none_of_them() -> None:
    own = [
        {**one, **more}
        for one, more in zip(OWN, ({"evaluate.total": 130.3, "evaluate.margin": 220.2},) * 2, strict=True)
    ]
    own[0]["evaluate.correct"] = 303.0
    own[1] = {**own[1], "evaluate.total": 190.9, "evaluate.margin": 290.9}
    reduced = [[call(220.2)], [call(290.9)]]
    (found,) = judged(strided(800), size=800, numbers=own, given=reduced, shown=[prints(0.7575, 0.32575, 0.5505), []])
    assert found.subjects == ("correct", "total")
    assert any(one.startswith("also total: Rank 0 printed 0.32575") for one in found.evidence)


@pytest.mark.parametrize("shown", [6100 / 3900, math.exp(6100 / 3900)], ids=["a token", "perplexity"])
def test_what_is_divided_by_another_number_of_the_same_function_is_a_metric(shown: float) -> None:
    tokens = [{"evaluate.nll": 6100.0, "evaluate.tokens": 3900.0}, {"evaluate.nll": 9000.0, "evaluate.tokens": 5000.0}]
    (found,) = judged(strided(800), size=800, numbers=tokens, shown=[prints(shown), []])
    assert (found.code, found.subjects, found.ranks) == ("DDP802", ("nll",), (0,))
    assert (
        judged(
            strided(800),
            size=800,
            numbers=tokens,
            shown=[[MetricShown(0, "printed", LINE, (ShownNumber("1.6"),))], []],
        )
        == []
    )
    assert judged(strided(800), size=800, numbers=tokens, shown=[prints(151 / 89), []]) == []  # of all
    apart = [{"evaluate.nll": one["evaluate.nll"], "train.tokens": one["evaluate.tokens"]} for one in tokens]
    assert judged(strided(800), size=800, numbers=apart, shown=[prints(shown), []]) == []  # of another function
    half = [{**one, "evaluate.nll": nll} for one, nll in zip(tokens, (1950.0, 1000.0), strict=True)]
    assert (
        judged(strided(800), size=800, numbers=half, shown=[prints(50.0), []]) == []
    )  # other numbers may give it, too


def held_of(counts: Any, added: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The numbers that are written down of a function which adds to `counts` in a pass over a loader."""
    monkeypatch.setattr(evaluation_recorder, "patched", lambda *_: None)
    written: list[Any] = []
    recorder = EvaluationRecorder(written.append)
    loader = LoaderPass(3, 0, LOOP, "Photos", 8, indices=[0, 2, 4, 6], batch_size=400, batches=1, exhausted=True)

    def evaluate() -> None:
        others = torch.zeros(2)
        recorder.note_pass(loader, None)
        for place in range(len(added)):
            counts[place] += added[place]
        recorder.note_pass(loader, None)
        assert not others.any()

    evaluate()
    held = written[-1].numbers
    return {name: held[name] for name in held if name.startswith("evaluate.") and "counts" in name}


@pytest.mark.parametrize(
    "zeros",
    [
        lambda: torch.zeros(2),
        lambda: torch.zeros(2, dtype=torch.float64),
        lambda: torch.zeros(2, dtype=torch.int64),
        lambda: numpy.zeros(2),
        lambda: [0, 0],
        lambda: [torch.tensor(0), 0],
    ],
    ids=["float32", "float64", "int64", "numpy", "list", "list of tensors"],
)
def test_counts_that_are_kept_together_are_told_apart(zeros: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [held_of(zeros(), added, monkeypatch) for added in ((500, 700), (600, 900))]
    assert (
        own[0].items()
        >= {"evaluate.counts[0]": 500.0, "evaluate.counts[1]": 700.0, "evaluate.sum(counts)": 1200.0}.items()
    )
    shown = [prints(float(torch.tensor(5) / 7)), []]  # a quotient of float32
    (found,) = judged(strided(800), size=800, numbers=own, shown=shown)
    assert (found.code, found.subjects, found.ranks) == ("DDP802", ("counts[0]",), (0,))
    apart = [
        {"evaluate.hits[0]": 500.0, "evaluate.counts[1]": 700.0},
        {"evaluate.hits[0]": 600.0, "evaluate.counts[1]": 900.0},
    ]
    assert judged(strided(800), size=800, numbers=apart, shown=shown) == []
    reduced = [[call(500.0, 700.0)], [call(600.0, 900.0)]]
    assert judged(strided(800), size=800, numbers=own, given=reduced, shown=[prints(11 / 16), []]) == []
    assert judged([range(400), range(400)], size=400, numbers=own, shown=shown) == []  # each rank evaluates all


def test_a_table_of_counts_has_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [[[301.0, 100.0], [100.0, 600.0]], [[400.0, 100.0], [200.0, 600.0]]]
    own = [held_of(torch.zeros(2, 2), list(map(torch.tensor, table)), monkeypatch) for table in tables]
    assert own[0] == {"evaluate.sum(counts)": 1101.0, "evaluate.trace(counts)": 901.0}
    (found,) = judged(strided(800), size=800, numbers=own, shown=[prints(901 / 1101), []])
    assert (found.code, found.subjects) == ("DDP802", ("trace(counts)",))
    assert judged(strided(800), size=800, numbers=own, shown=[prints(1901 / 2401), []]) == []  # of all


@pytest.mark.parametrize(
    ("added", "places"),
    [
        ((3, 1, 4), 3),
        ((3, 1, 2, 2), 0),  # of classes
        ((3, 1, 2, 4), 4),  # and all samples
        ((3, 1, 2, 0.5), 4),  # and a loss
    ],
)
def test_counts_of_classes_are_one_sum(added: Sequence[float], places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_of(torch.zeros(len(added)), added, monkeypatch)
    assert sum(name.endswith("]") for name in held) == places
    assert ("evaluate.sum(counts)" in held) == (4 not in added)


@pytest.mark.parametrize(
    "numbers", [torch.tensor([1.0, 0.0]), torch.zeros(8192), torch.zeros(2, dtype=torch.complex64)]
)
def test_what_does_not_begin_with_zeros_or_is_large_is_no_counter(
    numbers: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held_of(numbers, (5, 7), monkeypatch) == {}


@pytest.mark.parametrize(("text", "known"), [("0.7500", True), ("75.0", True), ("0.8", False), ("3.00", False)])
def test_a_printed_number_is_known_by_its_digits(text: str, known: bool) -> None:
    shown = [MetricShown(0, "printed", LINE, (ShownNumber(text),))]
    assert codes(judged(strided(800), size=800, numbers=OWN, shown=[shown, []])) == ["DDP802"] * known


@pytest.mark.parametrize(
    "more",
    [
        {"shown": [prints(0.75), prints(0.5)]},  # each rank tells its own
        {"shown": [prints(0.625), []]},  # that of all
        {"shown": [prints(0.75, 0.625), []]},  # both
        {"shown": [prints(0.75), []], "given": [[call(300.0)], [call(200.0)]]},  # which is reduced
        {"shown": [prints(0.3), []]},  # another number
        {"shown": [prints(0.75), []], "numbers": [OWN[0], OWN[0]]},  # the same on all ranks
        {"shown": [prints(0.75), []], "numbers": [OWN[0], {}]},
    ],
)
def test_a_metric_that_is_of_all_or_of_nobody_is_not_reported(more: dict[str, Any]) -> None:
    assert judged(strided(800), **{"size": 800, "numbers": OWN, **more}) == []


def test_ranks_that_evaluate_all_samples_have_no_shard() -> None:
    assert judged([range(400), range(400)], size=400, numbers=OWN, shown=[prints(0.75), []]) == []


def test_a_metric_of_a_subset_beside_that_of_all_is_known() -> None:
    subsets = strided(800)
    assert codes(judged(subsets, size=400, numbers=OWN, shown=[prints(0.75), []])) == ["DDP802"]
    assert judged(subsets, size=400, numbers=OWN, shown=[prints(0.75, 0.625), []]) == []


# Order


LABELS = [0, 1, 2, 3, 0, 1, 2, 3]
RIGHT = [[0, 2, 0, 2], [1, 3, 1, 3]]  # of all samples, by rank


def test_results_in_the_order_of_the_ranks_are_compared_with_labels_in_another() -> None:
    given = [[call(operation="all_gather", rows=of)] for of in RIGHT]
    compared = {"size": 8, "given": given, "references": {"labels": LABELS}}
    (found,) = judged(strided(8), shown=[prints(2 / 8), []], **compared)
    assert (found.code, found.location) == ("DDP803", REDUCE)
    assert "the 0.25 that is printed would be 1" in found.message
    assert judged(strided(8), shown=[prints(1.0), []], **compared) == []
    blocks = [range(4), range(4, 8)]  # in which gathering keeps the order
    assert judged(blocks, shown=[prints(2 / 8), []], **compared) == []


def with_classes(of_rank: Sequence[Sequence[int]], **more: Any) -> list[list[LoaderPass]]:
    known = {"exhausted": True, "batch_size": 4, "batches": 2, **more}
    return [
        [LoaderPass(3, 0, LOOP, "Photos", 8, indices=i, classes=[LABELS[x] for x in c], **known)]
        for i, c in zip(of_rank, strided(8), strict=True)
    ]


def test_labels_that_the_dataset_does_not_hold_are_those_that_came_with_the_samples() -> None:
    given = [[call(operation="all_gather_object", rows=of)] for of in RIGHT]
    passes = [[EvaluationPass(0, 3, 0)]] * 2
    for text, code in (("", "DDP803"), ("0.250", "DDP803"), ("0.251", "")):
        value = 0.25 if not text else float(text)
        shown = [[MetricShown(0, "printed", LINE, (ShownNumber(text, (value,)),))], []]
        loaders = with_classes(strided(8))
        assert codes(judge_evaluations(loaders, passes, given, shown)) == [code] * bool(code)
    beneath = [[100 + index for index in of_rank] for of_rank in strided(8)]  # of a `Subset`
    loaders = with_classes(beneath, subset=range(100, 108))
    assert codes(judge_evaluations(loaders, passes, given, [prints(0.25), []])) == ["DDP803"]
    both = [[*of, call(operation="all_gather_object", rows=of[0].rows)] for of in given]
    assert judge_evaluations(loaders, passes, both, [prints(0.25), []]) == []  # the labels are gathered, too


TARGETS = [0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 3.0, 0.0]
PREDICTED = [0.6, -0.8, 1.7, 0.3, 1.1, -0.7, 2.5, 0.4]  # of each sample


def errors(predicted: Sequence[float]) -> list[float]:
    return [p - t for p, t in zip(predicted, TARGETS, strict=True)]


@pytest.mark.parametrize("power", [1, 2])
def test_targets_are_compared_with_what_was_gathered_rank_by_rank(power: int) -> None:
    of_ranks = [[PREDICTED[index] for index in of_rank] for of_rank in strided(8)]
    wrong, right = (
        sum(abs(error) ** power for error in errors(order)) / 8 for order in ([*of_ranks[0], *of_ranks[1]], PREDICTED)
    )
    given = [[call(operation="all_gather", rows=[int(v > 0) for v in of], values=of)] for of in of_ranks]

    def found(value: float, *others: float, text: str = "", given: Any = given, **more: Any) -> list[str]:
        loaders = [[LoaderPass(3, 0, LOOP, "Houses", 8, indices=i, **known, **more)] for i in strided(8)]
        passes = [[EvaluationPass(0, 3, 0, numbers_of={"prices": TARGETS})]] * 2
        return codes(judge_evaluations(loaders, passes, given, [prints(value, *others, text=text), []]))

    known = {"exhausted": True, "batch_size": 4, "batches": 2}
    assert found(wrong) == ["DDP803"]
    assert found(right) == found(wrong, right) == found(wrong + 0.1) == []
    digits = f"{wrong:.2f}"
    assert found(float(digits), text=digits) == []  # any number may be printed so
    labels = [[TARGETS[index] for index in of_rank] for of_rank in strided(8)]
    both = [[*of, call(operation="all_gather", rows=[0] * 4, values=t)] for of, t in zip(given, labels, strict=True)]
    assert found(wrong, given=both) == ["DDP803"] and found(right, given=both) == []


def test_targets_are_those_that_come_with_the_samples_too() -> None:
    known = {"exhausted": True, "batch_size": 4, "batches": 2}
    loaders = [
        [LoaderPass(3, 0, LOOP, "Houses", 8, indices=i, targets=[TARGETS[x] for x in i], **known)] for i in strided(8)
    ]
    of_ranks = [[PREDICTED[index] for index in of_rank] for of_rank in strided(8)]
    given = [[call(operation="all_gather", rows=[0] * 4, values=of)] for of in of_ranks]
    wrong = max(abs(error) for error in errors([*of_ranks[0], *of_ranks[1]]))
    (found,) = judge_evaluations(loaders, [[EvaluationPass(0, 3, 0)]] * 2, given, [prints(wrong), []])
    assert (found.code, found.location) == ("DDP803", REDUCE)
    assert "the largest error" in found.evidence[2]


def test_results_and_targets_that_a_script_compares_in_two_orders() -> None:
    known = {"exhausted": True, "batch_size": 4, "batches": 2}
    loaders = [[LoaderPass(3, 0, LOOP, "Houses", 8, indices=i, **known)] for i in strided(8)]
    passes = [[EvaluationPass(0, 3, 0, numbers_of={"prices": TARGETS})]] * 2
    of_ranks = [[PREDICTED[index] for index in of_rank] for of_rank in strided(8)]
    given = [[call(operation="all_gather", rows=[0] * 4, values=of)] for of in of_ranks]
    joined, targets = [*of_ranks[0], *of_ranks[1]], [TARGETS[i] for of_rank in strided(8) for i in of_rank]

    def found(one: Sequence[float], other: Sequence[float], *, number: int = 0) -> list[str]:
        met = [[RowsCompared(number, LINE, one, other)], []]
        return codes(judge_evaluations(loaders, passes, given, [[], []], met))

    assert found(joined, TARGETS) == found(TARGETS, joined) == ["DDP803"]
    assert found([3 * x + 1 for x in joined], [3 * x + 1 for x in TARGETS]) == ["DDP803"]
    assert found(PREDICTED, TARGETS) == found(joined, targets) == found(joined, PREDICTED) == []
    assert found(joined, TARGETS[:7]) == found([0.0] * 8, TARGETS) == found(joined, TARGETS, number=1) == []


def test_comparisons_are_followed_from_a_gather_to_the_next_loop() -> None:
    seen: list[RowsCompared] = []
    recorder = ComparisonRecorder(seen.append)
    one, other = torch.arange(8.0), torch.ones(8, 1)
    plain = vars(torch.Tensor).get("__sub__")
    recorder.open(2, 8)
    try:
        for _ in range(2):
            (one[:, None] - other).square().mean()  # once for each line
        torch.nn.HuberLoss()(one, one + 1)
        assert (one == 3).sum() == 1 and (one[:4] - one[4:]).abs().sum() == 16  # no pairs, or too few
        assert len({one, one, other}) == 2
    finally:
        recorder.close()
    assert one.sub(one + 2).sum() == -16
    assert [(each.round, list(each.one), list(each.other)) for each in seen] == [
        (2, list(map(float, range(8))), [1.0] * 8),
        (2, list(map(float, range(8))), list(map(float, range(1, 9)))),
    ]
    assert vars(torch.Tensor).get("__sub__") is plain and torch.nn.functional.mse_loss.__module__.startswith("torch")


def test_metrics_of_pairs() -> None:
    pairs = [((p,), (t,)) for p, t in zip(PREDICTED, TARGETS, strict=True)]
    p, t = torch.tensor(PREDICTED).double(), torch.tensor(TARGETS).double()
    expected = {
        "mean squared error": torch.nn.functional.mse_loss(p, t),
        "mean absolute error": torch.nn.functional.l1_loss(p, t),
        "smooth L1 loss": torch.nn.functional.smooth_l1_loss(p, t),
        "norm of the errors": torch.linalg.vector_norm(p - t),
        "median absolute error": (p - t).abs().median(),
        "coefficient of determination": 1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(),
        "explained variance": 1 - (p - t).var() / t.var(),
        "correlation": torch.corrcoef(torch.stack([p, t]))[0, 1],
        "rank correlation": torch.corrcoef(torch.stack([p.argsort().argsort(), t.argsort().argsort()]).double())[0, 1],
        "cosine similarity": torch.nn.functional.cosine_similarity(p, t, dim=0),
    }
    for name, value in expected.items():
        assert OF_NUMBERS[name](pairs) == pytest.approx(float(value), rel=1e-6), name
    assert math.isnan(OF_NUMBERS["correlation"]([((1.0,), (2.0,))]))
    scores = [((0.9,), (1.0,)), ((0.4,), (0.0,)), ((0.4,), (1.0,)), ((0.1,), (0.0,))]
    assert OF_SCORES["area under the curve"](scores) == 0.875
    undefined = [((math.nan,), (1.0,)), ((2.0,), (0.0,))]
    assert math.isnan(OF_NUMBERS["rank correlation"](undefined))
    assert math.isnan(OF_SCORES["area under the curve"](scores + undefined))


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (torch.tensor([[0.5], [1.5]]), [0.5, 1.5]),
        (torch.tensor([[0.5, 1.0], [1.5, 2.0]]), [0.5, 1.0, 1.5, 2.0]),
        ([0.5, 1.5], [0.5, 1.5]),
        ([[0.5], [1.5, 2.5]], [0.5, 1.5, 2.5]),
        ([torch.tensor([0.5]), torch.tensor([1.5])], [0.5, 1.5]),
        (torch.ones(2, 9), []),  # scores of classes, or pictures
        (torch.tensor([1, 2]), []),
        (torch.tensor(1.5), []),
        ({"loss": 0.5}, []),
    ],
)
def test_what_is_gathered_may_be_numbers(given: Any, values: list[float]) -> None:
    assert list(_values_given(given)) == values


def test_rows_that_are_gathered_batch_by_batch_are_joined_rank_by_rank_or_call_by_call() -> None:
    rows = [[0, 2, 2, 3], [1, 3, 1, 1]]  # right: 5 of 8
    halves = [
        [call(operation="all_gather", rows=half, during=True) for half in (of_rank[:2], of_rank[2:])]
        for of_rank in rows
    ]
    by_call, by_rank = [0, 2, 1, 3, 2, 3, 1, 1], [0, 2, 2, 3, 1, 3, 1, 1]
    agree = [sum(a == b for a, b in zip(order, LABELS, strict=True)) / 8 for order in (by_call, by_rank)]
    assert agree[0] != agree[1]
    for value in (*agree, 0.875):
        found = judged(strided(8), size=8, given=halves, references={"labels": LABELS}, shown=[prints(value), []])
        assert codes(found) == ["DDP803"] * (value in agree)


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
    given = gathered_in_turn(predicted, labels, indices)
    own: dict[str, Any] = {"size": 9, "given": given, "references": {"labels": labels}}
    assert judged(indices, shown=[prints(5 / 9), []], **own) == []
    other = [list(given[0]), list(given[1])]  # rank 1 has other weights: another prediction of samples that it repeats
    other[1][2] = replace(other[1][2], rows=[3, 0, 1, 2])
    assert judged(indices, shown=[prints(5 / 9), []], **own | {"given": other}) == []
    sums = [[replace(one, total=4.0, numbers=(2.0,) * 4) for one in of_rank] for of_rank in given]
    assert judged(indices, size=9, given=sums) == []  # labels whose sum is by chance the number of samples
    twice = sum(labels[x] == predicted[x] for of_rank in indices for x in of_rank) / 16
    assert codes(judged(indices, shown=[prints(twice), []], **own)) == ["DDP801"]
    unsaid = judged(indices, shown=[prints(twice), []], batch_size=1, **own)  # by a sampler of batches
    assert codes(unsaid) == ["DDP801"]
    of_another = [[replace(one, evaluation=(4, 0)) for one in of_rank] for of_rank in given]
    assert judged(indices, size=9, given=of_another, shown=[prints(twice), []]) == []


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ([1, 0], [1, 0]),
        ([[1, 0], [2]], [1, 0, 2]),
        ([torch.tensor([1, 0]).numpy(), torch.tensor([2]).numpy()], [1, 0, 2]),
        ([0.2, 0.9], [0, 1]),
        (torch.tensor([0.2, 0.9]), [0, 1]),
        (torch.tensor([[-2.0], [0.2]]), [0, 1]),
        (torch.tensor(0.5), []),
        (["a", "b"], []),
        ({"labels": [1]}, []),
    ],
)
def test_what_is_gathered_has_a_label_for_each_row(given: Any, rows: list[int]) -> None:
    assert list(_rows_given(given)) == rows


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
LOSSES = [
    {"evaluate.total": 3.06},
    {"evaluate.total": 2.02},
]  # 0.51 and 1.01 a sample; 0.76, and 0.635 over all of them


def test_the_mean_of_means_of_more_and_fewer_samples_is_reported() -> None:
    for first, second in (([call(0.51)], [call(1.01)]), ([call(1.53)], [call(1.01)])):  # by samples, by batches
        plain = (first[0].numbers[0] + second[0].numbers[0]) / 2
        (found,) = judged(UNEVEN, size=8, numbers=LOSSES, given=[first, second], shown=[prints(plain), []])
        assert (found.code, found.location) == ("DDP805", REDUCE)
        assert "2 to 6 samples" in found.message
    assert "over all samples it is 1.4" in found.message


@pytest.mark.parametrize(
    "more",
    [
        {"shown": [prints(0.635), []]},  # weighted
        {"shown": [prints(0.76, 0.635), []]},
        {"shown": [(), ()]},
        {"given": [[call(3.06, 6.0)], [call(2.02, 2.0)]]},  # sums and counts
        {"given": [[call(0.4)], [call(1.1)]]},  # another number
        {"indices": [range(4), range(4, 8)], "numbers": [{"evaluate.total": 2.0}, {"evaluate.total": 4.0}]},
        {
            "numbers": [{"evaluate.total": 3.0}, {"evaluate.total": 1.01}],
            "given": [[call(0.5)], [call(0.505)]],
            "shown": [prints(0.5025), []],
        },
    ],
)
def test_means_that_weigh_alike_are_not_reported(more: dict[str, Any]) -> None:
    made = {"size": 8, "numbers": LOSSES, "given": [[call(0.51)], [call(1.01)]], "shown": [prints(0.76), []], **more}
    assert judged(made.pop("indices", UNEVEN), **made) == []


def test_ranks_with_subsets_of_their_own_evaluate_together() -> None:
    loaders = [
        [LoaderPass(3, 0, LOOP, "Photos", len(i), batch_size=4, batches=2, exhausted=True, indices=i, subset=i)]
        for i in UNEVEN
    ]
    passes = [[EvaluationPass(0, 3, 0, held)] for held in LOSSES]
    given, shown = [[call(0.51)], [call(1.01)]], [prints(0.76), []]
    assert codes(judge_evaluations(loaders, passes, given, shown)) == ["DDP805"]


# Targets


def use(own: int, targets: Sequence[int], *, step: int = 0) -> GatheredTargets:
    return GatheredTargets(step, LINE, (0, 1), own, 4, 8, tuple(targets))


def test_targets_that_name_the_rows_of_rank_0_on_every_rank_are_reported() -> None:
    uses = [[use(0, range(4))], [use(4, range(4))]]
    (found,) = judge_targets(Evaluations(targets=uses, losses=[[], []]))
    assert (found.code, found.ranks, found.location) == ("DDP804", (1,), LINE)
    of_loss = [[LossDifferentiated(0, 0, (), None, Location("train.py", 7))] for _ in uses]
    (found,) = judge_targets(Evaluations(targets=uses, losses=of_loss))
    assert found.location == Location("train.py", 7) and f"gathered at {LINE}" in found.evidence
    assert "those of rank 1 begin at 4" in found.message
    (found,) = judge_targets(
        Evaluations(targets=[[replace(one, loss=LOOP) for one in of_rank] for of_rank in uses], losses=of_loss)
    )
    assert found.location == LOOP


def test_an_offset_may_be_a_wrong_one() -> None:
    assert codes(
        judge_targets(Evaluations(targets=[[use(0, range(4, 8))], [use(4, range(4, 8))]], losses=[[], []]))
    ) == ["DDP804"]
    assert (
        codes(judge_targets(Evaluations(targets=[[use(0, range(4))], [use(4, range(2))]], losses=[[], []]))) == []
    )  # chosen in some way


@pytest.mark.parametrize(
    "uses",
    [
        [[use(0, range(4))], [use(4, range(4, 8))]],  # with the offset
        [[use(0, range(4))], [use(0, range(4))]],  # each rank puts its own first
        [[use(0, range(8))], [use(4, range(8))]],  # all of the rows on both sides
        [[use(0, range(4))], [use(4, range(4), step=1)]],
        [[use(0, range(4))], []],
    ],
)
def test_targets_that_name_own_rows_are_right(uses: Any) -> None:
    assert judge_targets(Evaluations(targets=uses, losses=[[], []])) == []


@pytest.mark.parametrize("product", ["matmul", "einsum", "linear", "scaled"])
def test_the_rows_of_a_rank_are_found_in_the_loss(product: str) -> None:
    rows, others = torch.randn(4, 3), torch.randn(4, 3)
    x = torch.randn(4, 3, requires_grad=True)
    everyone = torch.cat([others, torch.nn.functional.normalize(rows, dim=1)])
    logits = {
        "matmul": lambda: x @ everyone.T,
        "einsum": lambda: torch.einsum("nc,kc->nk", x, everyone),
        "linear": lambda: torch.nn.functional.linear(x, everyone),
        "scaled": lambda: ((x @ everyone.T) / 0.1).masked_fill(torch.zeros(4, 8, dtype=torch.bool), -1e9),
    }[product]()
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4))
    ((targets, columns),) = _cross_entropies(0.5 * loss + x.sum())
    assert targets.tolist() == [0, 1, 2, 3] and _first_column_of(rows, columns) == 4
    assert _first_column_of(torch.randn(4, 3), columns) is None


# What the program holds


def test_numbers_and_labels_are_read_as_they_are_held() -> None:
    assert [number_of(v) for v in (3, 0.5, torch.tensor([2]), True, "3", float("nan"), torch.zeros(2))] == [
        *(3.0, 0.5, 2.0),
        *(None, None, None, None),
    ]
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    for held in (
        torch.tensor([1, 0]),
        [1, 0],
        logits,
        [logits[:1], logits[1:]],
        [torch.tensor([1]), torch.tensor([0])],
    ):
        labels = labels_in(held, 2)
        assert labels is not None and labels.tolist() == [1, 0]
    for held in (torch.tensor(1), [torch.tensor(0)], torch.zeros(2), "ab", [0.5, 1.0], torch.zeros(2, 2, 2), [1]):
        assert labels_in(held, 2) is None


def test_the_columns_of_a_table_that_the_program_holds_are_labels() -> None:
    results = [(7, 1, 0), (8, 0, 0), (9, 0, 1)]  # the number of a sample, what was predicted, and its label
    found = {name.partition(".")[2]: labels.tolist() for name, labels in rows_of_program(len(results)).items()}
    assert found == {"results[1]": [1, 0, 0], "results[2]": [0, 0, 1]}


@pytest.mark.parametrize("kind", ["<i8", ">i4", "<u2"])
@pytest.mark.filterwarnings("error")
def test_arrays_that_torch_does_not_take_as_they_are_are_read_without_a_warning(kind: str, tmp_path: Path) -> None:
    numpy.asarray([1, 0, 2], kind).tofile(tmp_path / "train.bin")
    labels = labels_in(numpy.memmap(tmp_path / "train.bin", dtype=kind, mode="r"), 3)
    assert labels is not None and labels.tolist() == [1, 0, 2]
    long = array_of(numpy.asarray([1.5, 2.5], numpy.longdouble))
    assert long is not None and long.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        ([(1, 0), (2, 2), (0, 1)], [[1, 2, 0], [0, 2, 1]]),
        ([(0.25, 0), (0.5, 2), (0.75, 1)], [[0.25, 0.5, 0.75], [0, 2, 1]]),
        ([{"file": "a", "p": 1}, {"file": "b", "p": 2}, {"file": "c", "p": 0}], [[1, 2, 0]]),
        (torch.tensor([[1, 0], [2, 2], [0, 1]]), [[1, 2, 0], [0, 2, 1]]),
        (torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, 1.0]]), [[1, 2, 0], [0, 2, 1]]),
        (torch.tensor([[0.1, 0.5], [0.3, 0.2], [0.4, 0.6]]), []),  # scores of classes
        ([[1, 0, 2, 2], [0, 1, 1, 1]], []),  # two batches of predictions: no row for each of three samples
        ([(1, 0), (2,), (0, 1)], []),
        ([1, 2, 0], []),
        ([], []),
    ],
)
def test_the_columns_of_gathered_rows(value: Any, columns: list[list[float]]) -> None:
    assert [list(map(float, one)) for one in columns_of(value, 3)] == columns


def test_gathered_rows_of_predictions_and_labels_say_what_each_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_recorder, "patched", lambda *_: None)
    exchanged: list[Any] = []
    recorder = EvaluationRecorder(exchanged.append)
    recorder._comparisons = Mock()
    recorder._evaluated, recorder._remaining, recorder._samples = True, [8, 8], 3
    rows = [(1, 0), (2, 2), (0, 1)]
    recorder.note_collective(Call("all_gather_object", "train.py:9", (0, 1)), {"obj": rows})
    assert [one.rows for one in exchanged if one.rows] == [(1, 2, 0), (0, 2, 1)]


@pytest.mark.parametrize("ahead", [True, False])
def test_what_a_loop_counts_of_a_batch_that_was_fetched_ahead(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_recorder, "patched", lambda *_: None)
    written: list[Any] = []
    recorder = EvaluationRecorder(written.append)
    loader = LoaderPass(3, 0, LOOP, "Photos", 8, indices=[0, 2, 4, 6], batch_size=4, batches=1, exhausted=True)

    def batches() -> Iterator[int]:
        recorder.note_pass(loader, None)
        if ahead:
            recorder.note_pass(loader, None)
        yield 3
        if not ahead:
            recorder.note_pass(loader, None)

    def evaluate() -> None:
        counted = 0
        for right in batches():
            counted += right
        recorder._prints(f"accuracy {counted / 4:.4f}")

    evaluate()
    *_, last = (one for one in written if isinstance(one, EvaluationPass))
    assert last.numbers["evaluate.counted"] == 3.0


def test_gathered_losses_count_twice_unless_they_are_cut() -> None:
    indices, losses = strided(9), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    of_ranks = [[losses[index] for index in of_rank] for of_rank in indices]
    given = [[call(operation="all_gather", rows=[0] * 5, values=tuple(of_rank))] for of_rank in of_ranks]
    assert codes(judged(indices, size=9, given=given, shown=[prints(4.6 / 10), []])) == ["DDP801"]
    assert judged(indices, size=9, given=given, shown=[prints(4.5 / 9), []]) == []


def test_what_is_shown_in_the_loop_of_the_next_evaluation_is_how_far_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_recorder, "patched", lambda *_: None)
    written: list[Any] = []
    recorder = EvaluationRecorder(written.append)
    for number in range(5):  # of which the last ones are not followed
        loader = LoaderPass(3, number, LOOP, "Photos", 8, batches=1, exhausted=True)
        recorder.note_pass(loader, None)
        recorder._prints("of a batch: 12.5")
        recorder.note_pass(loader, None)
        recorder._prints("12.25")
    shown = [number.text for one in written if isinstance(one, MetricShown) for number in one.numbers]
    assert shown == ["12.25"] * 3


@pytest.mark.parametrize(("parts", "found"), [("own", []), ("one", ["DDP801"]), ("shards", ["DDP801"])])
def test_samples_that_two_ranks_have_by_their_own_splits_are_no_padding(parts: str, found: list[str]) -> None:
    """The places that a sampler gives the ranks are all different; or it repeats one; or each has all of its shard."""
    subsets = [[3, 5, 7, 9], [5, 3, 11, 13]] if parts == "own" else [[3, 5, 7], [3, 5, 7]]
    indices = [[3, 7], [3, 13]] if parts == "own" else [[3, 7], [5, 3]]
    if parts == "shards":
        subsets = indices = [[3, 7], [5, 3]]
    loaders = [
        [
            LoaderPass(
                3,
                0,
                LOOP,
                "Photos",
                len(part),
                indices=own,
                subset=tuple(part),
                exhausted=True,
                batches=1,
                batch_size=2,
            )
        ]
        for own, part in zip(indices, subsets, strict=True)
    ]
    passes = [[EvaluationPass(0, 3, 0, {"evaluate.count": 2.0}, {}, {"evaluate": LINE})] for _ in indices]
    given = [[call(2.0)] for _ in indices]
    assert codes(judge_evaluations(loaders, passes, given, [[], []])) == found


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
