"""Losses of the ranks: terms, scale and counts of targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median

from ddpcheck.findings.evidence.gradients import LossTerm, relative
from ddpcheck.findings.evidence.loop import OwnPartPutBack
from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, one_finding
from ddpcheck.stream.rank_report import MicroBatch


def divided_by(losses: Sequence[LossDifferentiated]) -> tuple[float, Location | None, bool] | None:
    """Return the reduced total that divides all sums, and its line.

    A mean times the rank's own addend counts as a sum. The third item is True if other terms are means.
    """
    size = float(len(losses))
    if any(loss.hooked for loss in losses):
        return None
    for numbers in zip(*([number for number in loss.reduced if not number.members] for loss in losses), strict=False):
        total = sum(number.value for number in numbers)
        terms = [
            (term, term.kind == "sum" or _is_among(number.value, term.multipliers))
            for number, loss in zip(numbers, losses, strict=True)
            for term in loss.terms
            if term.factor
        ]
        sums = [term for term, is_sum in terms if is_sum]
        by_size = all(size in term.multipliers for term in sums) or any(size in term.divisors for term, _ in terms)
        if len({number.location for number in numbers}) > 1 or by_size or not all(map(_is_all_known, sums)):
            continue
        if total > 1 and all(_is_among(total, term.divisors) for term in sums):
            return total, numbers[0].location, len(sums) < len(terms)
    return None


def _is_among(number: float, numbers: Sequence[float]) -> bool:
    return any(map(partial(is_near, number), numbers))


def _is_all_known(term: ScaledTerm) -> bool:
    """Check if a term's divisors and multipliers explain its factor."""
    known = math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf)
    return bool(term.divisors) and is_near(abs(known), abs(term.factor))


def format_term(term: LossTerm, terms: Sequence[LossTerm]) -> str:
    """Format a loss term; all terms of one line count as one term."""
    labels = [(t.name, t.location) if t.name or t.location else index for index, t in enumerate(terms)]
    distinct = list(dict.fromkeys(labels))
    if term not in terms or len(distinct) == 1:
        return "the loss"
    source = " at ".join(text for text in (term.name, str(term.location or "")) if text)
    number = distinct.index(labels[list(terms).index(term)]) + 1
    return f"term {number} of {len(distinct)} of the loss{f' ({source})' if source else ''}"


IS_SUM = "is a sum"
"""Tag of a DDP305 on a term that sums over samples."""


BY_NORMALISATION = "by normalisation"
"""Tag of a DDP304 on samples coupled by a normalisation layer."""


MIN_GATHERS = 2  # steps


_NEAR = 1e-3  # relative rounding tolerance


_APART = 0.1  # relative difference of gradients of different losses


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
    if len(parts) < 2 or len(steps) < MIN_GATHERS or not unscaled:
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


_TWICE = 2.0  # ratio of element weights in half of the steps


_ALWAYS = 1.1  # ratio of average weights between ranks, with the same order in each step


_FEWEST = 5  # steps; one of two ranks leads in all by chance with probability 1/16


def severity_of_weights(steps: Sequence[Sequence[float]]) -> Severity:
    """Return the severity of unequal element weights, by step and rank up to scale."""
    steps = [step for step in steps if step and min(step) > 0]
    if not steps:
        return Severity.WARNING
    if median(max(step) / min(step) for step in steps) >= _TWICE:
        return Severity.ERROR
    shares = [[weight / sum(step) for weight in step] for step in steps]
    average = [sum(rank_weights) / len(shares) for rank_weights in zip(*shares, strict=True)]
    heaviest, lightest = average.index(max(average)), average.index(min(average))
    always = len(shares) >= _FEWEST and all(share[heaviest] > share[lightest] for share in shares)
    return Severity.ERROR if always and average[heaviest] >= _ALWAYS * average[lightest] else Severity.WARNING


FEWEST_PASSES = 3  # backward passes to compare


SCALE_TOLERANCE = 1e-3


SCALE_FREE = (  # optimizers invariant to gradient scale
    *("Adam", "NAdam", "RAdam", "Rprop", "Lion", "Adafactor", "Adagrad", "Adadelta", "RMSprop", "LAMB", "Lamb", "Muon"),
)


Losses = Sequence[Sequence[LossDifferentiated]]  # by rank, in order


def is_near(expected: float, value: float) -> bool:
    """Check if two numbers are equal within rounding."""
    return abs(expected - value) < SCALE_TOLERANCE * abs(expected)


def total_factor(term: ScaledTerm) -> float:
    """Return the total weight of a term's elements."""
    return term.factor * (term.count if term.kind == "sum" else 1)


MicroBatches = Sequence[tuple[MicroBatch, ...]]  # one head in one optimizer step, by rank


UNEQUAL_MESSAGES = {
    "DDP514": (
        "The loss of each micro-batch is divided by its own number of targets, and the numbers differ, so the "
        "accumulated gradient is a mean of means and not that of all targets of the step."
    ),
    "DDP305": (
        "The loss of each rank is divided by its own number of targets, and the numbers differ, so the average over "
        "ranks is a mean of means and not that of all targets of the step."
    ),
}
