"""DDP305: loss terms scaled by a rank-local number that persists between steps.

Numbers drawn or computed in each step (weights of mixtures or diffusion steps, counts of a batch) may differ between
ranks, and no rank's number stays larger. A number that a rank adapts to its own samples (a coefficient, a running
average), or computes once from its own shard of the data, is a defect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import one_finding

_FEWEST, _FEWEST_ADAPTED = 3, 8  # backward passes with a constant ratio, or a drifting ratio
_NEAR = 1e-4  # relative
_APART = 0.01  # smallest relevant log ratio
_SMOOTH = 0.25  # relative change of the log ratio between passes


def judge_own_weights(passes: Sequence[Sequence[LossDifferentiated]]) -> list[Finding]:
    """Return at most one finding; `passes` are backward passes, each by rank."""
    shapes = {tuple(term.kind for term in loss.terms) for by_rank in passes for loss in by_rank}
    for index in range(len(next(iter(shapes))) if len(shapes) == 1 else 0):
        terms = [[loss.terms[index] for loss in by_rank] for by_rank in passes]
        weights = [[_weight(term) for term in by_rank] for by_rank in terms]
        elements = [[_of_element(term) for term in by_rank] for by_rank in terms]
        if not all(map(all, weights)) or not all(_persists(numbers) for numbers in (weights, elements)):
            continue
        first, first_loss = terms[0][0], passes[0][0]
        text = ", ".join(f"by {weight:.4g} on rank {rank}" for rank, weight in enumerate(weights[-1]))
        return one_finding(
            "DDP305",
            ("loss",),
            "Each rank multiplies a term of the loss by a different number, which it keeps from step to step: samples "
            "of one rank count more than those of another.",
            location=first.location or first_loss.scaled or first_loss.made or first_loss.location,
            evidence=[f"in all {len(passes)} backward passes that were compared; in the last of them {text}"],
            severity=Severity.WARNING,
            fix="all_reduce the number, or the values that it is computed from, so that it is the same on every rank.",
        )
    return []


def _weight(term: ScaledTerm) -> float:
    """Return the factor of a term if made of program constants, else 0."""
    known = abs(math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf))
    return known if abs(known - abs(term.factor)) < _NEAR * known else 0.0


def _of_element(term: ScaledTerm) -> float:
    return abs(term.factor) / (term.count if term.kind == "mean" and term.count else 1)


def _persists(numbers: Sequence[Sequence[float]]) -> bool:
    """Check if a rank's numbers stay above or below rank 0's by similar ratios."""
    for rank in range(1, len(numbers[0])):
        ratios = [math.log(by_rank[rank] / by_rank[0]) for by_rank in numbers]
        changes = [abs(after - before) for before, after in itertools.pairwise(ratios)]
        typical, fewest = median(map(abs, ratios)), _FEWEST if max(changes, default=0.0) < _NEAR else _FEWEST_ADAPTED
        if len(ratios) >= fewest and typical > _APART and len({ratio > 0 for ratio in ratios}) == 1:
            if median(changes) < _SMOOTH * typical:
                return True
    return False
