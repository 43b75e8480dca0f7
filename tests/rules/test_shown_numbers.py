"""What speaks for it that a number is a metric, and which numbers are known for those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.evidence.evaluation import EvaluationPass, MetricShown, ResultExchanged, ShownNumber
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.registry import collect_until_not_recorded, judge_view
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.metrics import evaluations_of, table_metrics
from tests.reports import codes

LOOP, LINE, REDUCE, CALL = (Location("eval.py", line) for line in (10, 20, 30, 15))
SHARES = [range(0, 200, 2), range(1, 200, 2)]
Rounds = Sequence[Sequence[dict[str, Any]]]


def said(
    rounds: Rounds,
    shown: Sequence[Sequence[MetricShown]],
    given: Sequence[Sequence[ResultExchanged]] = ((), ()),
    indices: Sequence[Sequence[int]] = SHARES,
    size: int = 200,
) -> tuple[list[Finding], tuple[str, str]]:
    """The findings, and what was compared and what was not; `rounds`: by rank, the fields of each pass."""
    known = {"exhausted": True, "batch_size": 10, "batches": 10}
    loaders = [
        [LoaderPass(3, number, LOOP, "Photos", size, indices=of_rank, **known) for number in range(len(rounds[0]))]
        for of_rank in indices[: len(rounds)]
    ] + [[] for _ in indices[len(rounds) :]]
    passes = [[EvaluationPass(n, 3, n, **one) for n, one in enumerate(of_rank)] for of_rank in rounds]
    passes += [[] for _ in indices[len(rounds) :]]
    evaluations = evaluations_of(loaders, passes, given, shown, ())
    view = Evaluations(evaluations, loaders, shown)
    matches, not_compared = collect_until_not_recorded(view.compared, "evaluation", ())
    return judge_view(view), ("".join(matches), not_compared)


def prints(*texts: str, number: int = 0) -> MetricShown:
    return MetricShown(number, "printed", LINE, tuple(ShownNumber(text) for text in texts))


def counted(*of_ranks: float, name: str = "evaluate.hits") -> Rounds:
    return [[{"numbers": {name: count}}] for count in of_ranks]


def test_a_small_integer_is_no_evidence_and_a_sum_of_losses_is() -> None:
    assert codes(said(counted(1.0, 0.0, name="main.config['local_rank']"), [[prints("0.0100")], []])[0]) == []
    assert codes(said(counted(17.0, 41.0, name="main.user"), [[prints("0.1700")], []])[0]) == []
    assert codes(said(counted(51.37, 60.2), [[prints("0.5137")], []])[0]) == ["DDP802"]
    assert codes(said(counted(51.37, 60.2), [[prints("0.5")], []])[0]) == []


def test_evaluations_of_one_loop_are_evidence_together_and_one_of_another_number_speaks_against_it() -> None:
    hits = [[{"numbers": {"evaluate.hits": count}} for count in of_rank] for of_rank in ((17, 29), (41, 44))]
    assert codes(said(hits, [[prints("0.1700"), prints("0.2900", number=1)], []])[0]) == ["DDP802"]
    assert codes(said(hits, [[prints("0.1700"), prints("0.3100", number=1)], []])[0]) == []
    same = [[{"numbers": {"evaluate.hits": count}} for count in of_rank] for of_rank in ((17, 17), (41, 41))]
    assert codes(said(same, [[prints("0.1700"), prints("0.1700", number=1)], []])[0]) == []


TABLES = [(31.0, 9.0, 12.0, 48.0), (22.0, 18.0, 31.0, 29.0)]
OWN = table_metrics(TABLES[0])
ALL = table_metrics([a + b for a, b in zip(*TABLES, strict=True)])


def reduced(table: Sequence[float], *, before: bool = True, sums: bool = True) -> ResultExchanged:
    lines = {"reduced": Location("eval.py", 3), "Scores.reduce": CALL, "evaluate": Location("eval.py", 17)}
    numbers = tuple(table)
    return ResultExchanged(0, "all_reduce", REDUCE, False, numbers, sums=sums, shown=0 if before else 1, lines=lines)


def test_a_table_that_was_reduced_is_not_the_one_that_the_metric_is_computed_from() -> None:
    held = [[{"tables": {"evaluate.scores.table": table}}] for table in TABLES]
    texts = [f"{100 * OWN[name]:.1f}" for name in ("mean F1", "weighted IoU", "F1 of class 0")]
    given = [[reduced(table)] for table in TABLES]
    (found,), _ = said(held, [[prints(*texts)], []], given)
    assert (found.code, found.location, found.subjects) == ("DDP802", CALL, ("scores.table",))
    assert f"all_reduce is given it at {REDUCE}" in found.evidence[0] and found.fix
    (found,), _ = said(held, [[prints(*texts)], []])
    assert not found.fix  # it was not reduced
    overall = [f"{100 * ALL[name]:.1f}" for name in ("mean F1", "mean IoU")]
    assert codes(said(held, [[prints(*overall)], []], given)[0]) == []
    later = [[reduced(table, before=False)] for table in TABLES]
    assert codes(said(held, [[prints(*texts)], []], later)[0]) == []  # so far
    gathered = [[reduced(table, sums=False)] for table in TABLES]  # or the largest of all
    assert codes(said(held, [[prints(*texts)], []], gathered)[0]) == []


def test_metrics_of_a_table() -> None:
    found = table_metrics([3.0, 1.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0])
    assert found["accuracy"] == 5 / 8
    assert found["recall of class 0"] == 0.75 and found["precision of class 1"] == 2 / 3
    assert found["mean IoU"] == pytest.approx((3 / 4 + 2 / 5 + 0) / 3)
    assert "recall of class 2" not in found and found["mean recall"] == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert found["mean recall of all classes"] == pytest.approx((3 / 4 + 2 / 4) / 3)


def exchanged(*of_ranks: float) -> list[list[ResultExchanged]]:
    lines = {"averaged": Location("eval.py", 3), "evaluate": CALL}
    return [[ResultExchanged(0, "all_reduce", REDUCE, False, (value,), sums=True, lines=lines)] for value in of_ranks]


def test_a_share_of_the_whole_set_is_to_be_added_and_not_averaged() -> None:
    held = counted(51.37, 60.2, name="evaluate.total")
    shares = 51.37 / 200, 60.2 / 200
    (found,), (traced, lacking) = said(held, [[prints(f"{sum(shares) / 2:.5f}")], []], exchanged(*shares))
    assert (found.code, found.location) == ("DDP805", CALL)
    assert "over all samples it is 0.55785" in found.message
    assert not traced and lacking
    findings, (traced, lacking) = said(held, [[prints(f"{sum(shares):.5f}")], []], exchanged(*shares))
    assert not findings and traced and not lacking
    means = 51.37 / 100, 60.2 / 100
    assert codes(said(held, [[prints(f"{sum(means):.5f}")], []], exchanged(*means))[0]) == ["DDP805"]
    assert codes(said(held, [[prints(f"{sum(means) / 2:.5f}")], []], exchanged(*means))[0]) == []


def area(scores: Sequence[float], labels: Sequence[float]) -> float:
    pairs = [(p, n) for p, y in zip(scores, labels, strict=True) for n, z in zip(scores, labels, strict=True) if y > z]
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


def test_the_mean_of_areas_under_curves_is_not_that_of_all_samples() -> None:
    scores = [[math.sin(7 * n) * 0.4 + 0.5 for n in of_rank] for of_rank in SHARES]
    labels = [[float(math.cos(5 * n) + 3 * s > 1.5 + rank) for n, s in enumerate(of)] for rank, of in enumerate(scores)]
    held = [
        [{"rows": {"evaluate.scores": tuple(s), "evaluate.labels": tuple(y)}}]
        for s, y in zip(scores, labels, strict=True)
    ]
    areas = [area(s, y) for s, y in zip(scores, labels, strict=True)]
    right = area([*scores[0], *scores[1]], [*labels[0], *labels[1]])
    mean = sum(areas) / 2
    assert abs(mean - right) > 0.02
    (found,), _ = said(held, [[prints(f"{mean:.6f}")], []], exchanged(*areas))
    assert found.code == "DDP805" and f"over all samples it is {right:.6g}" in found.message
    findings, (traced, lacking) = said(held, [[prints(f"{right:.6f}")], []], exchanged(*areas))
    assert not findings and traced and not lacking


def test_numbers_that_are_not_compared_are_named_with_their_lines() -> None:
    held = counted(51.37, 60.2, name="evaluate.total")
    pooled = f"{(51.37 + 60.2) / 200:.5f}"
    assert said(held, [[prints(pooled)], []])[1] == (
        "1 number shown after 1 loop without backward: metrics of the samples of all ranks",
        "",
    )
    traced, lacking = said(held, [[prints(pooled, "0.4711")], []])[1]
    assert traced.startswith("1 number") and lacking == "not compared with all ranks: 0.4711 (eval.py:20)"
    assert "no number was seen" in said(held, [[], []])[1][1]


@pytest.mark.parametrize(("whole", "lacking"), [(True, False), (False, True)])
def test_what_one_rank_evaluates_alone_is_right_if_it_is_all(whole: bool, lacking: bool) -> None:
    indices = [range(200), ()] if whole else SHARES
    own = counted(51.37)
    samples = 200 if whole else 100
    assert bool(said(own, [[prints(f"{51.37 / samples:.5f}")], []], indices=indices)[1][1]) == lacking


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_are_not_finite_or_are_huge_are_no_error(odd: float) -> None:
    rows = {"evaluate.scores": (odd, *([0.5] * 99)), "evaluate.labels": (1.0, *([0.0] * 99))}
    held = [[{"rows": rows, "numbers": {"evaluate.total": 1e308}}] for _ in SHARES]
    findings, (traced, lacking) = said(held, [[prints("0.4711")], []], exchanged(1e308, 1e308))
    assert not findings and not traced and "0.4711" in lacking
