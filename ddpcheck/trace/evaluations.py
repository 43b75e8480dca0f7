"""Evaluations of a script, and results that explain shown numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Self

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    GatheredTargets,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
    SumsReduced,
)
from ddpcheck.findings.evidence.script import LoaderPass, LossDifferentiated
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names, plural
from ddpcheck.trace.evaluation import RankEvaluation, gathered_labels, shows
from ddpcheck.trace.metrics import Evaluation, evaluations_of
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View

_FEWEST_BITS = 2.0  # evidence that a number covers all samples; low, since no finding depends on it
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Evaluations(View):
    """Evaluations of a script; sequences are by rank, in order of time."""

    checks = ("evaluation",)
    evaluations: Sequence[Evaluation] = ()
    passes: Sequence[Sequence[LoaderPass]] = ()
    shown: Sequence[Sequence[MetricShown]] = ()
    sums: Sequence[Sequence[SumsReduced]] = ()
    targets: Sequence[Sequence[GatheredTargets]] = ()
    losses: Sequence[Sequence[LossDifferentiated]] = ()

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        if facts.trains_separate_models:
            return None
        shown = facts.events(MetricShown)
        exchanged, compared = facts.events(ResultExchanged), facts.events(RowsCompared)
        evaluations = evaluations_of(facts.passes, facts.events(EvaluationPass), exchanged, shown, compared)
        targets, losses = facts.events(GatheredTargets), facts.events(LossDifferentiated)
        return cls(evaluations, facts.passes, shown, facts.events(SumsReduced), targets, losses)

    def first_findings(self, judge: Callable[[Evaluation], list[Finding]]) -> list[Finding]:
        """Return the first finding of `judge` on the complete evaluations, in order, or []."""
        return next((findings for evaluation in self.complete if (findings := judge(evaluation))), [])[:1]

    @property
    def complete(self) -> list[Evaluation]:
        """Evaluations that every rank makes."""
        return [evaluation for evaluation in self.evaluations if len(evaluation.by_rank) == len(self.passes)]

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        """Describe how many shown numbers are metrics of all ranks' samples, or raise `NotRecorded`."""
        if not self.evaluations:
            return
        loops = f"after {plural(len(self.evaluations), 'loop')} without backward"
        traced, untraced = 0, dict[Location | None, str]()
        for rank, rank_shown in enumerate(self.shown):
            for output, number in ((item, number) for item in rank_shown for number in item.numbers):
                if _covers_all_samples(self.evaluations, len(self.shown), rank, output, number):
                    traced += 1
                else:
                    value = number.text or f"{number.values[0]:.6g}"
                    untraced.setdefault(output.location, f"{value} ({output.location})" if output.location else value)
        if traced:
            yield f"{plural(traced, 'number')} shown {loops}: metrics of the samples of all ranks"
        if untraced and not findings:
            raise NotRecorded(f"not compared with all ranks: {join_names([*untraced.values()], most=_MOST_NAMED)}")
        if not traced and not findings:
            raise NotRecorded(f"not compared: no number was seen that the script shows {loops}")


def _covers_all_samples(
    evaluations: Sequence[Evaluation], world_size: int, rank: int, shown: MetricShown, number: ShownNumber
) -> bool:
    """Return True if a shown number is a metric of all samples."""
    for evaluation in evaluations:
        if rank not in evaluation.by_rank or evaluation.by_rank[rank].results.round != shown.round:
            continue
        evals = evaluation.evals
        if len(evals) < world_size and any(not ev.samples >= ev.loader.size > 0 for ev in evals):
            continue
        if any(metric.evidence(number) >= _FEWEST_BITS for metric in evaluation.metrics):
            return True
        if any(shows(number, value) for value in _gathered_metrics(evals)):
            return True
    return False


def _gathered_metrics(evals: Sequence[RankEvaluation]) -> Iterator[float]:
    """Yield the accuracy for each pair of gathered lists, and means of gathered numbers."""
    gathered = gathered_labels(evals)
    for call, other_call in itertools.combinations(gathered, 2):
        equal = [*map(eq, itertools.chain(*call.rows), itertools.chain(*other_call.rows))]
        yield sum(equal) / max(1, len(equal))
    for call in gathered:
        values = [*itertools.chain(*itertools.chain(*call.values))]
        yield sum(values) / max(1, len(values))
