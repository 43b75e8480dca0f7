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
from tests.reports import assert_says, codes

LOOP, LINE, REDUCE, CALL = (Location("eval.py", line) for line in (10, 20, 30, 15))
SHARES = [range(0, 200, 2), range(1, 200, 2)]
Rounds = Sequence[Sequence[dict[str, Any]]]


def said(
    rounds: Rounds, shown: Any, given: Any = ((), ()), indices: Sequence[Sequence[int]] = SHARES
) -> tuple[list[Finding], tuple[str, str]]:
    """The findings, and what was compared and what was not; `rounds`: by rank, the fields of each pass."""
    known = {"exhausted": True, "batch_size": 10, "batches": 10}
    loaders: list[list[LoaderPass]] = [[] for _ in indices]
    passes: list[list[EvaluationPass]] = [[] for _ in indices]
    for rank, of_rank in enumerate(rounds):
        for n, fields in enumerate(of_rank):
            loaders[rank].append(LoaderPass(3, n, LOOP, "Photos", 200, indices=indices[rank], **known))
            passes[rank].append(EvaluationPass(n, 3, n, **fields))
    view = Evaluations(evaluations_of(loaders, passes, given, shown, ()), loaders, shown)
    matches, not_compared = collect_until_not_recorded(view.compared, "evaluation", ())
    return judge_view(view), ("".join(matches), not_compared)


def prints(*texts: str, number: int = 0) -> MetricShown:
    return MetricShown(number, "printed", LINE, tuple(ShownNumber(text) for text in texts))


def counted(*of_ranks: float, name: str = "evaluate.hits") -> Rounds:
    return [[{"numbers": {name: count}}] for count in of_ranks]


def of_rank_0(rounds: Rounds, *shown: MetricShown, exchanges: Any = ((), ())) -> list[str]:
    return codes(said(rounds, [shown, []], exchanges)[0])


def test_a_small_integer_is_no_evidence_and_a_sum_of_losses_is() -> None:
    assert of_rank_0(counted(1.0, 0.0, name="main.config['local_rank']"), prints("0.0100")) == []
    assert of_rank_0(counted(17.0, 41.0, name="main.user"), prints("0.1700")) == []
    assert of_rank_0(counted(51.37, 60.2), prints("0.5137")) == ["DDP802"]
    assert of_rank_0(counted(51.37, 60.2), prints("0.5")) == []


def test_evaluations_of_one_loop_are_evidence_together_and_one_of_another_number_speaks_against_it() -> None:
    hits = [[{"numbers": {"evaluate.hits": count}} for count in of_rank] for of_rank in ((17, 29), (41, 44))]
    assert of_rank_0(hits, prints("0.1700"), prints("0.2900", number=1)) == ["DDP802"]
    assert of_rank_0(hits, prints("0.1700"), prints("0.3100", number=1)) == []
    same = [of_rank[:1] * 2 for of_rank in hits]
    assert of_rank_0(same, prints("0.1700"), prints("0.1700", number=1)) == []


TABLES = [(31.0, 9.0, 12.0, 48.0), (22.0, 18.0, 31.0, 29.0)]
OWN = table_metrics(TABLES[0])
ALL = table_metrics([a + b for a, b in zip(*TABLES, strict=True)])


def reduced(table: Sequence[float], *, before: bool = True, sums: bool = True) -> ResultExchanged:
    lines = {"reduced": Location("eval.py", 3), "Scores.reduce": CALL, "evaluate": Location("eval.py", 17)}
    numbers = tuple(table)
    return ResultExchanged(0, "all_reduce", REDUCE, False, numbers, sums=sums, shown=0 if before else 1, lines=lines)


def test_a_table_that_was_reduced_is_not_the_one_that_the_metric_is_computed_from() -> None:
    tables = [[{"tables": {"evaluate.scores.table": table}}] for table in TABLES]
    shown = prints(*(f"{100 * OWN[name]:.1f}" for name in ("mean F1", "weighted IoU", "F1 of class 0")))
    exchanges = [[reduced(table)] for table in TABLES]
    (finding,), _ = said(tables, [[shown], []], exchanges)
    assert (finding.code, finding.location, finding.subjects) == ("DDP802", CALL, ("scores.table",))
    assert f"all_reduce is given it at {REDUCE}" in finding.evidence[0] and finding.fix
    (finding,), _ = said(tables, [[shown], []])
    assert not finding.fix  # it was not reduced
    overall = prints(*(f"{100 * ALL[name]:.1f}" for name in ("mean F1", "mean IoU")))
    assert of_rank_0(tables, overall, exchanges=exchanges) == []
    for later in ({"before": False}, {"sums": False}):  # so far; or the largest of all
        assert of_rank_0(tables, shown, exchanges=[[reduced(table, **later)] for table in TABLES]) == []


def test_metrics_of_a_table() -> None:
    metrics = table_metrics([3.0, 1.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0])
    names = ["accuracy", "recall of class 0", "precision of class 1", "mean IoU", "mean recall"]
    expected = [5 / 8, 3 / 4, 2 / 3, (3 / 4 + 2 / 5) / 3, (3 / 4 + 2 / 4) / 2]
    assert [metrics[name] for name in names] == pytest.approx(expected)
    assert metrics["mean recall of all classes"] == pytest.approx(5 / 12) and "recall of class 2" not in metrics


def exchanged(*of_ranks: float) -> list[list[ResultExchanged]]:
    lines = {"averaged": Location("eval.py", 3), "evaluate": CALL}
    return [[ResultExchanged(0, "all_reduce", REDUCE, False, (value,), sums=True, lines=lines)] for value in of_ranks]


def test_a_share_of_the_whole_set_is_to_be_added_and_not_averaged() -> None:
    totals = counted(51.37, 60.2, name="evaluate.total")
    shares = exchanged(51.37 / 200, 60.2 / 200)
    findings, (traced, lacking) = said(totals, [[prints(f"{(51.37 + 60.2) / 400:.5f}")], []], shares)
    assert_says(findings, f"DDP805 ... at {CALL} ... over all samples it is 0.55785")
    assert not traced and lacking
    findings, (traced, lacking) = said(totals, [[prints("0.55785")], []], shares)
    assert not findings and traced and not lacking
    means = exchanged(51.37 / 100, 60.2 / 100)
    assert of_rank_0(totals, prints("1.11570"), exchanges=means) == ["DDP805"]
    assert of_rank_0(totals, prints("0.55785"), exchanges=means) == []


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


def test_what_one_rank_evaluates_alone_is_right_if_it_is_all() -> None:
    for indices, samples in (([range(200), ()], 200), (SHARES, 100)):
        shown = [[prints(f"{51.37 / samples:.5f}")], []]
        assert bool(said(counted(51.37), shown, indices=indices)[1][1]) == (samples == 100)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e308])
def test_numbers_that_are_not_finite_or_are_huge_are_no_error(odd: float) -> None:
    rows = {"evaluate.scores": (odd, *([0.5] * 99)), "evaluate.labels": (1.0, *([0.0] * 99))}
    rounds = [[{"rows": rows, "numbers": {"evaluate.total": 1e308}}] for _ in SHARES]
    findings, (traced, lacking) = said(rounds, [[prints("0.4711")], []], exchanged(1e308, 1e308))
    assert not findings and not traced and "0.4711" in lacking
