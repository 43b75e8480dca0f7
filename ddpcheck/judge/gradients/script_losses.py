"""DDP303, 305 and 514: loss scales and rank-local divisors.

All entry points rate DDP305 for a mean of means by the size of its effect. If each rank takes the mean of its own
elements, elements on ranks with fewer elements weigh more. Random differences in counts, as of sequences of similar
length, favour no rank in the long run and are often intended: a warning. A large effect, or always the same favoured
rank, is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Sequence
from functools import partial
from statistics import median

from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import group_by, one_finding
from ddpcheck.judge.gradients.script_weights import judge_own_weights

LEAST_OF_GRADIENT = 0.05
"""Relative error against the global batch from which a mismatch is an error."""

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
_TOLERANCE = 1e-3
_UNEQUAL = 0.02  # relative to the smallest count
_WHOLE = 0.02  # distance from the nearest integer
_LARGEST = 1e5  # largest count recognizable as an integer from a float32 inverse
_WEIGHTS = (1.0, 0.5, 0.25, 0.2, 0.1, *map(float, range(2, 11)))  # weights of one term in a loss of several terms
SCALE_FREE = (  # optimizers invariant to gradient scale
    *("Adam", "NAdam", "RAdam", "Rprop", "Lion", "Adafactor", "Adagrad", "Adadelta", "RMSprop", "LAMB", "Lamb", "Muon"),
)

Losses = Sequence[Sequence[LossDifferentiated]]  # by rank, in order


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
        abs(term.factor) < 1 if term.kind == "sum" else abs(abs(term.factor) * count - 1) < _TOLERANCE for term in terms
    )


def _judge_scale(passes: Losses, together: int) -> list[Finding]:
    """Report a mean scaled by the world size or model group size (DDP303)."""
    losses = [loss for by_rank in passes for loss in by_rank]
    kinds = {term.kind for loss in losses for term in loss.terms}
    if not kinds or not all(loss.scaled and loss.terms for loss in losses):
        return []
    kind = "mean" if "mean" in kinds else "sum"
    scales = {round(abs(_total(t)) * (loss.number + 1), 4) for loss in losses for t in loss.terms if t.kind == kind}
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
    if factor not in sizes - {1} or any(abs(r * (1 if summed else models) / factor - 1) > _TOLERANCE for r in ratios):
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


def is_near(expected: float, value: float) -> bool:
    """Check if two numbers are equal within rounding."""
    return abs(expected - value) < _TOLERANCE * abs(expected)


def judge_accumulated(losses: Losses) -> list[Finding]:
    """Report micro-batch means that are added up without division (DDP514).

    Backward passes are micro-batches if all come from one line, and either the wrapper averages only after the last
    pass or the script takes a batch for each pass.
    """
    steps: dict[int, list[list[LossDifferentiated]]] = {}
    for rank, rank_losses in enumerate(losses):
        for loss in rank_losses:
            steps.setdefault(loss.step, [[] for _ in losses])[rank].append(loss)
    before = {step: [passes[-1].batches if passes else 0 for passes in by_rank] for step, by_rank in steps.items()}
    before[-1] = [0] * len(losses)
    accumulated = [
        (by_rank, before.get(step - 1))
        for step, by_rank in steps.items()
        if all(
            # known batch counts: no loader, one batch per pass, or the previous step was recorded
            len(passes) > 1 and (not passes[-1].batches or step - 1 in before or passes[0].batches < passes[-1].batches)
            for passes in by_rank
        )
    ]
    undivided = [
        by_rank
        for by_rank, counts in accumulated
        if all(_is_undivided(passes, 0 if counts is None else counts[rank]) for rank, passes in enumerate(by_rank))
    ]
    if len(undivided) < FEWEST_PASSES - 1 or len(undivided) < len(accumulated):
        return []
    first = undivided[0][0]
    return one_finding(
        "DDP514",
        ("loss",),
        f"The losses of {len(first)} micro-batches, each a mean, are added up and not divided by their number: the "
        f"gradient of a step is {len(first)} times that of the same samples in one batch.",
        location=first[0].uncounted or first[0].made or first[0].location,
        evidence=[
            f"nothing divides the means by {len(first)}, in all {len(undivided)} optimizer steps that were compared",
            "the function is given num_items_in_batch, and does not read it" if first[0].uncounted else "",
        ],
        severity=Severity.WARNING,
        fix="Divide sums over items by num_items_in_batch; or let the trainer divide by the number of micro-batches "
        "(model_accepts_loss_kwargs = False)."
        if first[0].uncounted
        else "Divide the loss by the number of micro-batches of the step before backward.",
    )


def _is_undivided(passes: Sequence[LossDifferentiated], before: int) -> bool:
    """Check if backward passes are micro-batches whose losses are undivided means.

    `before`: batches taken when the step began; larger than later counts if a new epoch has begun.
    """
    last, wrappers = passes[-1], set(passes[-1].wrappers)
    kinds = {tuple(term.kind for term in loss.terms) for loss in passes}
    if not wrappers or len({loss.location for loss in passes}) > 1 or len(kinds) > 1:
        return False
    is_wrapped = all(not wrappers.isdisjoint((*loss.put_off, *loss.wrappers)) for loss in passes)
    takes_batches = all(earlier.batches < later.batches for earlier, later in itertools.pairwise(passes))
    put_off = all(not wrappers.isdisjoint(loss.put_off) for loss in passes[:-1])
    prefetched = put_off and (last.batches < before or last.batches - before >= len(passes))  # before the first pass
    if not is_wrapped or not (takes_batches or prefetched if last.batches else put_off):
        return False
    weights = [max(loss.weighed or map(abs, map(_total, loss.terms)), default=0.0) for loss in passes]
    scales = {tuple(map(_scales_of_mean, loss.terms)) for loss in passes}
    divided = any(is_near(1 / len(passes), weight) for loss in passes for weight in loss.weighed)
    return all(abs(weight - 1.0) < _TOLERANCE for weight in weights) or (
        not divided
        and len(scales) == 1
        and all(factors and not _divides(factors, len(passes)) for factors in scales.pop() or ((),))
    )


def _scales_of_mean(term: ScaledTerm) -> tuple[float, ...]:
    """Return the scales of a mean (or sum over rows), if all are known."""
    rows = next((div for div in term.divisors if div > 1 and not term.count % div), 1.0) if term.kind == "sum" else 1.0
    divisors = [div for div in term.divisors if div not in (rows, 0.0)]
    known = is_near(math.prod(term.multipliers) / math.prod(divisors) / rows, abs(term.factor))
    return (
        (1.0, *term.multipliers, *(1 / div for div in divisors)) if known and (rows > 1 or term.kind == "mean") else ()
    )


def _divides(scales: Sequence[float], count: int) -> bool:
    """Check if a product of some scales is 1 / `count`."""
    subsets = itertools.chain.from_iterable(itertools.combinations(scales[:8], n) for n in range(1, 9))
    return any(is_near(1 / count, math.prod(subset)) for subset in subsets)


def _total(term: ScaledTerm) -> float:
    """Return the total weight of a term's elements."""
    return term.factor * (term.count if term.kind == "sum" else 1)


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
            return _unequal_counts(passes, all_counts, unequal)
    return []


def _unequal_counts(passes: Losses, all_counts: Sequence[list[float]], unequal: Sequence[list[float]]) -> list[Finding]:
    line = _line_of_sums(*next(pair for pair in zip(passes, all_counts, strict=True) if pair[1]))
    number = "a number that is summed over some of the ranks only" if line else "its own number of elements"
    return one_finding(
        "DDP305",
        ("loss",),
        f"The loss of each rank is divided by {number}, and the numbers differ, so the average over ranks is a mean of "
        "means and not that of all elements of the step.",
        location=line or _line_of_counts(passes) or passes[0][0].made or passes[0][0].location,
        evidence=[
            f"in {len(unequal)} of {len(passes)} backward passes that were compared; in the first of them "
            + ", ".join(f"by {count:.0f} on rank {rank}" for rank, count in enumerate(unequal[0]))
        ],
        severity=severity_of_weights([[1 / n for n in counts] or [1.0] * len(passes[0]) for counts in all_counts]),
        fix="all_reduce the numbers, and divide by their sum / world_size, for the gradients are averaged.",
    )


def _line_of_sums(losses: Sequence[LossDifferentiated], counts: Sequence[float]) -> Location | None:
    """Return the all_reduce over some ranks that makes each rank's divisor."""
    for numbers in zip(*([number for number in loss.reduced if number.members] for loss in losses), strict=False):
        sums = [sum(number.value for r, number in enumerate(numbers) if r in reduced.members) for reduced in numbers]
        line: Location | None = numbers[0].location
        if all(map(is_near, counts, sums)):
            return line
    return None


def _line_of_counts(passes: Losses) -> Location | None:
    """Return the line of the only term whose count or factor differs."""
    lines = {
        terms[0].location
        for by_rank in passes
        for terms in zip(*(loss.terms for loss in by_rank), strict=False)
        if len({(term.count, round(term.factor, 9)) for term in terms}) > 1
    }
    return lines.pop() if len(lines) == 1 else None


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
