"""DDP309, DDP303: losses over all ranks' features that lose a part of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpcheck.findings.evidence.gradients import relative
from ddpcheck.findings.evidence.loop import GatheredConstant, OwnPartPutBack
from ddpcheck.findings.evidence.script import LossDifferentiated
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, join_names, one_finding, plural_verb
from ddpcheck.judge.gradients.script_alone import short

_FEWEST = 2  # steps
_NEAR = 1e-3  # relative rounding tolerance
_APART = 0.1  # relative difference of gradients of different losses


def judge_gathers(uses: Sequence[Sequence[GatheredConstant]]) -> list[Finding]:
    """Report gathered features that a loss treats as constants; at most one finding.

    Needs all ranks (`uses` by rank) in `_FEWEST` steps, or in one if parameters get no gradient: DDP raises next.
    """
    steps = [{one.step for one in of_rank} for of_rank in uses]
    common = set.intersection(*steps) if len(uses) > 1 else set()
    if not common:
        return []
    one = uses[0][0]
    if names := [*map(short, one.names)]:
        return one_finding(
            "DDP309",
            names,
            f"{join_names(names)} {plural_verb('reaches', 'reach', names)} the loss only through the result of "
            f"{one.operation}, which carries no gradient: {plural_verb('it gets', 'they get', names)} none.",
            location=one.location,
            evidence=["its input carries a gradient, and its result is in the loss and carries none"],
            fix="Use torch.distributed.nn.functional.all_gather, which autograd differentiates.",
        )
    if len(common) < _FEWEST:
        return []
    return one_finding(
        "DDP309",
        (one.operation,),
        f"The loss treats the {one.rows} rows that {one.operation} gathered as constants, including the rank's own "
        "rows: a feature gets the gradient of its row of the loss only, and no gradient of other rows.",
        location=one.location,
        evidence=["its input carries a gradient, and its result is in the loss and carries none"],
        severity=Severity.WARNING,
        fix="Use torch.distributed.nn.functional.all_gather, which autograd differentiates; or put the rank's own "
        "features back (parts[rank] = features), and have every rank compute the loss of all rows, times the world "
        "size.",
    )


def judge_own_parts(
    parts: Sequence[Sequence[OwnPartPutBack]], losses: Sequence[Sequence[LossDifferentiated]], *, scale_matters: bool
) -> list[Finding]:
    """Report gathered features that pass on local gradients only (DDP303, DDP309); by rank.

    If the same gradient arrives on every rank, each rank has the loss of all rows: the ranks' parts sum to the
    gradient, and DDP divides the sum by the world size. The factor matters if steps depend on gradient scale, or the
    loss also uses the features directly. If gradients differ, gradients from other ranks' losses are lost.
    """
    by_step = [{one.step: one for one in reversed(of_rank)} for of_rank in parts]
    steps = [[of_rank[step] for of_rank in by_step] for step in sorted(set.intersection(*map(set, by_step)))]
    steps = [of_ranks for of_ranks in steps if all(any(one.arrived) for one in of_ranks)]
    every = [one for of_ranks in steps for one in of_ranks]
    as_it_is = len({one.by_function for one in every}) == 1 and all(abs(one.factor - 1) < _NEAR for one in every)
    if len(parts) < 2 or len(steps) < _FEWEST or not as_it_is:
        return []
    first, apart = every[0], [_difference([one.arrived for one in of_ranks]) for of_ranks in steps]
    seen = f"in {counted(len(steps), 'compared step')}"
    fix = "Gather with torch.distributed.nn.functional.all_gather, whose backward adds up the gradients of all ranks"
    end = "; or do so in the backward of the script's own function." if first.by_function else ", and put no part back."
    fix += end
    if min(apart) > _APART:
        return one_finding(
            "DDP309",
            (first.operation,),
            f"The loss of each rank depends on the features of all ranks, gathered by {first.operation}, and its "
            "gradient reaches the rank's own features only: the gradient from the losses of other ranks is lost.",
            location=first.location,
            evidence=[f"the gradient of the gathered rows differs between ranks, {seen}"],
            severity=Severity.WARNING,
            fix=fix,
        )
    used = [one for of_rank in losses for one in of_rank if any(step[0].step == one.step for step in steps)]
    terms, besides = [term for one in used for term in one.terms], all(one.besides for one in every)
    plain = all(
        (besides or (term.kind == "mean" and abs(term.factor) < 1 + _NEAR)) and len(parts) not in term.multipliers
        for term in terms
    )
    if max(apart) > _NEAR or not (scale_matters or besides) or not terms or not plain:
        return []
    part = "its part of the gradients is" if besides else "gradients are"
    return one_finding(
        "DDP303" if first.by_function else "DDP309",
        ("loss",) if first.by_function else (first.operation,),
        f"Each rank computes the loss of the rows of all ranks, gathered by {first.operation}, but the gradient of "
        f"this loss reaches the rank's own features only. DDP averages over the ranks: {part} 1/{len(parts)} of what "
        "the loss asks for.",
        location=first.location,
        evidence=[
            f"the gradient of the gathered rows is the same on every rank, {seen}",
            *(["other terms of the loss use the features directly, and have their whole gradient"] * besides),
        ],
        severity=Severity.WARNING,
        fix=f"Multiply {'these terms' if besides else 'the loss'} by the world size. Or: {fix}",
    )


def _difference(sketches: Sequence[Sequence[float]]) -> float:
    """Return the largest relative distance of a sketch from the first rank's."""
    first, *others = sketches
    if any(len(other) != len(first) for other in others):
        return math.inf
    return relative(max(math.dist(first, other) for other in others), math.hypot(*first))
