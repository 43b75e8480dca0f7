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
    steps = [{use.step for use in rank_uses} for rank_uses in uses]
    common = set.intersection(*steps) if len(uses) > 1 else set()
    if not common:
        return []
    first = uses[0][0]
    if names := [*map(short, first.names)]:
        return one_finding(
            "DDP309",
            names,
            f"{join_names(names)} {plural_verb('reaches', 'reach', names)} the loss only through the result of "
            f"{first.operation}, which carries no gradient: {plural_verb('it gets', 'they get', names)} none.",
            location=first.location,
            evidence=["its input carries a gradient, and its result is in the loss and carries none"],
            fix="Use torch.distributed.nn.functional.all_gather, which autograd differentiates.",
        )
    if len(common) < _FEWEST:
        return []
    return one_finding(
        "DDP309",
        (first.operation,),
        f"The loss treats the {first.rows} rows that {first.operation} gathered as constants, including the rank's own "
        "rows: a feature gets the gradient of its row of the loss only, and no gradient of other rows.",
        location=first.location,
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
    indexed = [{part.step: part for part in reversed(rank_parts)} for rank_parts in parts]
    steps = [[by_step[step] for by_step in indexed] for step in sorted(set.intersection(*map(set, indexed)))]
    steps = [by_rank for by_rank in steps if all(any(part.arrived) for part in by_rank)]
    every = [part for by_rank in steps for part in by_rank]
    unscaled = len({part.by_function for part in every}) == 1 and all(abs(part.factor - 1) < _NEAR for part in every)
    if len(parts) < 2 or len(steps) < _FEWEST or not unscaled:
        return []
    first, distances = every[0], [_difference([part.arrived for part in by_rank]) for by_rank in steps]
    seen_in = f"in {counted(len(steps), 'compared step')}"
    fix = "Gather with torch.distributed.nn.functional.all_gather, whose backward adds up the gradients of all ranks"
    end = "; or do so in the backward of the script's own function." if first.by_function else ", and put no part back."
    fix += end
    if min(distances) > _APART:
        return one_finding(
            "DDP309",
            (first.operation,),
            f"The loss of each rank depends on the features of all ranks, gathered by {first.operation}, and its "
            "gradient reaches the rank's own features only: the gradient from the losses of other ranks is lost.",
            location=first.location,
            evidence=[f"the gradient of the gathered rows differs between ranks, {seen_in}"],
            severity=Severity.WARNING,
            fix=fix,
        )
    used = [loss for rank_losses in losses for loss in rank_losses if any(step[0].step == loss.step for step in steps)]
    terms, is_mixed = [term for loss in used for term in loss.terms], all(part.besides for part in every)
    is_plain = all(
        (is_mixed or (term.kind == "mean" and abs(term.factor) < 1 + _NEAR)) and len(parts) not in term.multipliers
        for term in terms
    )
    if max(distances) > _NEAR or not (scale_matters or is_mixed) or not terms or not is_plain:
        return []
    phrase = "its part of the gradients is" if is_mixed else "gradients are"
    return one_finding(
        "DDP303" if first.by_function else "DDP309",
        ("loss",) if first.by_function else (first.operation,),
        f"Each rank computes the loss of the rows of all ranks, gathered by {first.operation}, but the gradient of "
        f"this loss reaches the rank's own features only. DDP averages over the ranks: {phrase} 1/{len(parts)} of what "
        "the loss asks for.",
        location=first.location,
        evidence=[
            f"the gradient of the gathered rows is the same on every rank, {seen_in}",
            *(["other terms of the loss use the features directly, and have their whole gradient"] * is_mixed),
        ],
        severity=Severity.WARNING,
        fix=f"Multiply {'these terms' if is_mixed else 'the loss'} by the world size. Or: {fix}",
    )


def _difference(sketches: Sequence[Sequence[float]]) -> float:
    """Return the largest relative distance of a sketch from the first rank's."""
    first, *others = sketches
    if any(len(sketch) != len(first) for sketch in others):
        return math.inf
    return relative(max(math.dist(first, sketch) for sketch in others), math.hypot(*first))
