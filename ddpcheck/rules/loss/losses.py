"""Judges of the scale and normalisation of losses in a script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from functools import partial

from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import group_by, one_finding
from ddpcheck.rules.loss.ddp305_loss_normalisation import judge_own_weights, unequal_counts_finding
from ddpcheck.trace.losses import FEWEST_PASSES, SCALE_TOLERANCE, Losses, is_near, total_factor

LEAST_OF_GRADIENT = 0.05
"""Relative error against the global batch from which a mismatch is an error."""


_UNEQUAL = 0.02  # relative to the smallest count


_WHOLE = 0.02  # distance from the nearest integer


_LARGEST = 1e5  # largest count recognizable as an integer from a float32 inverse


_WEIGHTS = (1.0, 0.5, 0.25, 0.2, 0.1, *map(float, range(2, 11)))  # weights of one term in a loss of several terms


def judge_losses(
    losses: Losses, whole: Sequence[Container[int]] = (), *, together: int = 1, summed: bool = False
) -> list[Finding]:
    """Judge losses whose gradients DDP averages.

    Under tensor parallelism, `losses` are of one rank per model. `whole` has the steps, by rank, whose loss covers all
    ranks and whose gradient is a part of the total.
    """
    losses = [[loss for loss in rank_losses if loss.wrappers] for rank_losses in losses]  # last micro-batch per step
    indexed = [{(loss.step, loss.number): loss for loss in rank_losses} for rank_losses in losses]
    common = sorted(set.intersection(*map(set, indexed))) if indexed else []
    all_passes = [[by_pass[key] for by_pass in indexed] for key in common]
    for passes in group_by(all_passes, lambda by_rank: tuple(loss.location for loss in by_rank)).values():
        if len(passes) >= FEWEST_PASSES and (findings := _judge_loss(passes, whole, together=together, summed=summed)):
            return findings
    return []


def _judge_loss(passes: Losses, whole: Sequence[Container[int]], *, together: int, summed: bool) -> list[Finding]:
    """Judge one of several losses, such as of a generator or discriminator."""
    is_partial = any(by_rank[rank].step in steps for by_rank in passes for rank, steps in enumerate(whole))
    findings = [] if is_partial or summed else _judge_scale(passes, together) or _judge_shared(passes)
    findings = findings or _judge_counted_again(passes, together, summed=summed)
    return findings or _judge_counts(passes) or judge_own_weights(passes)


def are_for_sums(losses: Losses, wrapper: int) -> bool:
    """Check if a wrapper's losses need gradients summed over ranks, not averaged.

    Each loss is a sum divided by a number equal on all ranks, or a mean divided by the world size.
    """
    every = [loss for entries in losses for loss in entries if wrapper in loss.wrappers or wrapper in loss.put_off]
    micro_batches = {loss.step: loss.number + 1 for loss in every}  # by step
    terms: dict[tuple[int, int], list[ScaledTerm]] = {}
    for entry in every:
        terms.setdefault((entry.step, entry.number), []).extend(entry.terms)
    passes = [(micro_batches[step], pass_terms) for (step, _), pass_terms in terms.items() if pass_terms]
    return bool(passes) and all(_is_for_sums(pass_terms, count * len(losses)) for count, pass_terms in passes)


def _is_for_sums(terms: Sequence[ScaledTerm], count: int) -> bool:
    """Check the terms of a backward pass; `count`: passes per step over all ranks."""
    is_uniform = len({round(term.factor, 9) for term in terms}) == 1
    return is_uniform and all(
        abs(term.factor) < 1 if term.kind == "sum" else abs(abs(term.factor) * count - 1) < SCALE_TOLERANCE
        for term in terms
    )


def _judge_scale(passes: Losses, together: int) -> list[Finding]:
    """Report a mean scaled by the world size or model group size (DDP303)."""
    losses = [loss for by_rank in passes for loss in by_rank]
    kinds = {term.kind for loss in losses for term in loss.terms}
    if not kinds or not all(loss.scaled and loss.terms for loss in losses):
        return []
    kind = "mean" if "mean" in kinds else "sum"
    scales = {
        round(abs(total_factor(t)) * (loss.number + 1), 4) for loss in losses for t in loss.terms if t.kind == kind
    }
    sizes = _sizes(len(passes[0]), together)
    for size in sizes:
        divided = {round(1.0 / size, 4), *([float(size)] if kind == "mean" else [])}  # a sum may match by chance
        fits = len(kinds) == 1 or all(size in (*t.divisors, *t.multipliers) for loss in losses for t in loss.terms)
        if fits and len(scales) == 1 and scales <= divided and not any(loss.number + 1 == size for loss in losses):
            break  # else the divisor may be the number of micro-batches
    else:
        return []
    excess = max(scales) - 1
    verb = "multiplied" if excess > 0 else "divided"
    return one_finding(
        "DDP303",
        ("loss",),
        f"The loss is a mean that is {verb} by {sizes[size]}, and DDP averages its gradients over the ranks: they are "
        f"{size if excess > 0 else f'1/{size} of'} {'times ' if excess > 0 else ''}those of the mean.",
        location=losses[0].scaled,
        evidence=[f"in all {len(passes)} backward passes that were compared, on every rank"],
        severity=Severity.WARNING,
        fix="Do not scale the loss: DDP averages gradients, which gives the gradient of the mean over all ranks.",
    )


def _sizes(replicas: int, together: int) -> dict[int, str]:
    """Return the numbers of ranks that may scale a loss, with descriptions."""
    words = {replicas * together: "the world size"}
    if together > 1:
        words.setdefault(together, "the number of ranks that compute one model together")
        words.setdefault(replicas, "the number of models that are trained data parallel")
    return {size: text for size, text in words.items() if size > 1}


def _judge_shared(passes: Losses) -> list[Finding]:
    """Report sums divided by a global number, and by DDP again (DDP303)."""
    divisors = [_divided_by(by_rank) for by_rank in passes]
    if not all(divisors):
        return []
    total, line, is_mixed = next(filter(None, divisors))
    part, effect = ("A term of the loss", "it has {} of its weight relative to the other terms")
    if not is_mixed:
        part, effect = "The loss", "gradients are {} of those of the mean"
    return one_finding(
        "DDP303",
        ("loss",),
        f"{part} of each rank is a sum, divided by a number that is summed over all ranks, and DDP averages over the "
        f"ranks again: {effect.format(f'1/{len(passes[0])}')}.",
        location=line,
        evidence=[f"in all {len(passes)} backward passes that were compared; in the first of them by {total:g}"],
        severity=Severity.WARNING,
        fix="Divide the number by dist.get_world_size(), or multiply the loss by it: DDP averages over the ranks.",
    )


def _judge_counted_again(passes: Losses, together: int, *, summed: bool) -> list[Finding]:
    """Report sums divided by a count that includes each model group's duplicates (DDP303).

    If gradients are averaged, dividing by the global count is also wrong: DDP divides by the number of models again.
    """
    steps: dict[int, list[LossDifferentiated]] = group_by(itertools.chain.from_iterable(passes), lambda loss: loss.step)
    compared = [
        [term for loss in step_losses for term in loss.terms]
        for step_losses in steps.values()
        if all(len(loss.terms) == 1 and not loss.number for loss in step_losses)
    ]
    is_uniform = all(len({(term.kind, round(term.factor, 9)) for term in terms}) == 1 for terms in compared)
    if together < 2 or len(compared) < max(FEWEST_PASSES, len(steps)) or not is_uniform or compared[0][0].kind != "sum":
        return []
    models = len(passes[0])
    ratios = [1 / (abs(terms[0].factor) * sum(term.count for term in terms)) for terms in compared if terms[0].factor]
    factor = round(ratios[0] * (1 if summed else models)) if ratios else 0
    sizes = {together} if summed else {together, models, together * models}
    if factor not in sizes - {1} or any(
        abs(r * (1 if summed else models) / factor - 1) > SCALE_TOLERANCE for r in ratios
    ):
        return []
    first = passes[0][0]
    note = "" if summed else ", and DDP averages over the replicas again"
    return one_finding(
        "DDP303",
        ("loss",),
        f"The loss is a sum, divided by {ratios[0]:.3g} times the number of its elements in all replicas{note}: "
        f"gradients are 1/{factor} of those of the mean.",
        location=first.scaled or first.made or first.location,
        evidence=[
            f"in all {len(compared)} backward passes that were compared",
            f"{together} ranks compute one model together, and have the same elements",
        ],
        severity=Severity.WARNING,
        fix="Sum the number over the data dimension of the mesh only"
        + ("." if summed else ", and multiply the loss by the size of that, over which DDP averages."),
    )


def _divided_by(losses: Sequence[LossDifferentiated]) -> tuple[float, Location | None, bool] | None:
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


def _judge_counts(passes: Losses) -> list[Finding]:
    """Report sums that each rank divides by its own number (DDP305)."""
    for weight in _WEIGHTS:
        all_counts = [_own_counts(by_rank, weight) for by_rank in passes]
        unequal = [counts for counts in all_counts if counts]
        distinct = len({tuple(counts) for counts in unequal})  # else a weight may yield integers by chance
        if (
            len(unequal) >= FEWEST_PASSES
            and 2 * len(unequal) > len(passes)
            and (weight == 1.0 or distinct >= FEWEST_PASSES)
        ):
            return unequal_counts_finding(passes, all_counts, unequal)
    return []


def _own_counts(losses: Sequence[LossDifferentiated], weight: float) -> list[float]:
    """Return the integer divisors of a sum by rank, if ranks differ."""
    sample_heads = set().union(*map(_sample_heads, losses))
    for terms in zip(*(loss.terms for loss in losses), strict=False):
        if any(term.head in sample_heads for term in terms):
            continue
        counts = [_divisor(term, weight, terms[0].factor) for term in terms]
        if min(counts) >= 1 and max(counts) > min(counts) * (1 + _UNEQUAL):
            if max(counts) < _LARGEST and all(abs(count - round(count)) < _WHOLE for count in counts):
                return counts
    return []


def _sample_heads(loss: LossDifferentiated) -> set[int | None]:
    """Return heads whose per-sample terms have different divisors."""
    by_head = group_by((term for term in loss.terms if term.head is not None), lambda term: term.head)
    return {head for head, terms in by_head.items() if len({round(term.factor, 9) for term in terms}) > 1}


def _divisor(term: ScaledTerm, weight: float, factor: float) -> float:
    """Return the divisor of a sum, or of a mean relative to `factor`."""
    if term.kind == "mean":
        return term.count * abs(factor / term.factor) if term.chosen and term.factor else 0.0
    return weight / abs(term.factor) if term.factor else 0.0
