"""DDP305: terms of a loss that each rank multiplies by a number of its own, which it keeps from step to step.

Numbers that are drawn or computed anew in each step (the weight of a mixture, of a step of a diffusion, of what a batch
holds) differ between ranks by right, and are now larger on one, now on the other. A number that a rank adapts by its
own samples (a coefficient, a running average), or that it has computed once from its own part of the data, is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import one_finding

_FEWEST, _FEWEST_ADAPTED = 3, 8  # passes, where the ratio is the same in all, or goes on from one to the next
_NEAR = 1e-4  # relative
_APART = 0.01  # of the logarithm of a ratio, before that matters
_SMOOTH = 0.25  # of it, that it may change from one pass to the next


def judge_own_weights(passes: Sequence[Sequence[LossDifferentiated]]) -> list[Finding]:
    """At most one finding; `passes` each on all ranks."""
    shapes = {tuple(term.kind for term in one.terms) for of_ranks in passes for one in of_ranks}
    for place in range(len(next(iter(shapes))) if len(shapes) == 1 else 0):
        terms = [[one.terms[place] for one in of_ranks] for of_ranks in passes]
        weights = [[_weight(term) for term in of_ranks] for of_ranks in terms]
        elements = [[_of_element(term) for term in of_ranks] for of_ranks in terms]
        if not all(map(all, weights)) or not all(_goes_on(numbers) for numbers in (weights, elements)):
            continue
        first, line = terms[0][0], passes[0][0]
        by_rank = ", ".join(f"by {weight:.4g} on rank {rank}" for rank, weight in enumerate(weights[-1]))
        return one_finding(
            "DDP305",
            ("loss",),
            "Each rank multiplies a term of the loss by a different number, which it keeps from step to step: samples "
            "of one rank count more than those of another.",
            location=first.location or line.scaled or line.made or line.location,
            evidence=[f"in all {len(passes)} backward passes that were compared; in the last of them {by_rank}"],
            severity=Severity.WARNING,
            fix="all_reduce the number, or the values that it is computed from, so that it is the same on every rank.",
        )
    return []


def _weight(term: ScaledTerm) -> float:
    """By what a term is multiplied, where constants of the program make that; else 0."""
    known = abs(math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf))
    return known if abs(known - abs(term.factor)) < _NEAR * known else 0.0


def _of_element(term: ScaledTerm) -> float:
    return abs(term.factor) / (term.count if term.kind == "mean" and term.count else 1)


def _goes_on(numbers: Sequence[Sequence[float]]) -> bool:
    """Whether those of some rank are always more than the first rank's, or always less, and by about as much again."""
    for rank in range(1, len(numbers[0])):
        ratios = [math.log(of_ranks[rank] / of_ranks[0]) for of_ranks in numbers]
        changes = [abs(after - before) for before, after in itertools.pairwise(ratios)]
        far, fewest = median(map(abs, ratios)), _FEWEST if max(changes, default=0.0) < _NEAR else _FEWEST_ADAPTED
        if len(ratios) >= fewest and far > _APART and len({ratio > 0 for ratio in ratios}) == 1:
            if median(changes) < _SMOOTH * far:
                return True
    return False
