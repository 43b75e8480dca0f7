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
    parts = [[weight / sum(step) for weight in step] for step in steps]
    average = [sum(of_rank) / len(parts) for of_rank in zip(*parts, strict=True)]
    most, least = average.index(max(average)), average.index(min(average))
    always = len(parts) >= _FEWEST and all(part[most] > part[least] for part in parts)
    return Severity.ERROR if always and average[most] >= _ALWAYS * average[least] else Severity.WARNING


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
    losses = [[one for one in of_rank if one.wrappers] for of_rank in losses]  # the last micro-batch of each step
    by_place = [{(one.step, one.number): one for one in of_rank} for of_rank in losses]
    common = sorted(set.intersection(*map(set, by_place))) if by_place else []
    every = [[of_rank[place] for of_rank in by_place] for place in common]
    for passes in group_by(every, lambda of_ranks: tuple(one.location for one in of_ranks)).values():
        if len(passes) >= FEWEST_PASSES and (found := _judge_loss(passes, whole, together=together, summed=summed)):
            return found
    return []


def _judge_loss(passes: Losses, whole: Sequence[Container[int]], *, together: int, summed: bool) -> list[Finding]:
    """Judge one of several losses, such as of a generator or discriminator."""
    add_up = any(of_ranks[rank].step in steps for of_ranks in passes for rank, steps in enumerate(whole))
    found = [] if add_up or summed else _judge_scale(passes, together) or _judge_shared(passes)
    found = found or _judge_counted_again(passes, together, summed=summed)
    return found or _judge_counts(passes) or judge_own_weights(passes)


def are_for_sums(losses: Losses, wrapper: int) -> bool:
    """Check if a wrapper's losses need gradients summed over ranks, not averaged.

    Each loss is a sum divided by a number equal on all ranks, or a mean divided by the world size.
    """
    every = [one for of_rank in losses for one in of_rank if wrapper in one.wrappers or wrapper in one.put_off]
    last = {one.step: one.number + 1 for one in every}  # micro-batches by step
    terms: dict[tuple[int, int], list[ScaledTerm]] = {}
    for one in every:
        terms.setdefault((one.step, one.number), []).extend(one.terms)
    of_passes = [(last[step], of_pass) for (step, _), of_pass in terms.items() if of_pass]
    return bool(of_passes) and all(_is_for_sums(of_pass, count * len(losses)) for count, of_pass in of_passes)


def _is_for_sums(terms: Sequence[ScaledTerm], count: int) -> bool:
    """Check the terms of a backward pass; `count`: passes per step over all ranks."""
    alike = len({round(term.factor, 9) for term in terms}) == 1
    return alike and all(
        abs(term.factor) < 1 if term.kind == "sum" else abs(abs(term.factor) * count - 1) < _TOLERANCE for term in terms
    )


def _judge_scale(passes: Losses, together: int) -> list[Finding]:
    """Report a mean scaled by the world size or model group size (DDP303)."""
    every = [one for of_ranks in passes for one in of_ranks]
    kinds = {term.kind for one in every for term in one.terms}
    if not kinds or not all(one.scaled and one.terms for one in every):
        return []
    known = "mean" if "mean" in kinds else "sum"
    scales = {round(abs(_total(t)) * (one.number + 1), 4) for one in every for t in one.terms if t.kind == known}
    sizes = _sizes(len(passes[0]), together)
    for size in sizes:
        divided = {round(1.0 / size, 4), *([float(size)] if known == "mean" else [])}  # a sum may match by chance
        by_it = len(kinds) == 1 or all(size in (*t.divisors, *t.multipliers) for one in every for t in one.terms)
        if by_it and len(scales) == 1 and scales <= divided and not any(one.number + 1 == size for one in every):
            break  # else the divisor may be the number of micro-batches
    else:
        return []
    power = max(scales) - 1
    says = "multiplied" if power > 0 else "divided"
    return one_finding(
        "DDP303",
        ("loss",),
        f"The loss is a mean that is {says} by {sizes[size]}, and DDP averages its gradients over the ranks: they are "
        f"{size if power > 0 else f'1/{size} of'} {'times ' if power > 0 else ''}those of the mean.",
        location=every[0].scaled,
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
    lines = [_divided_by(of_ranks) for of_ranks in passes]
    if not all(lines):
        return []
    total, line, besides = next(filter(None, lines))
    what, lost = ("A term of the loss", "it has {} of its weight relative to the other terms")
    if not besides:
        what, lost = "The loss", "gradients are {} of those of the mean"
    return one_finding(
        "DDP303",
        ("loss",),
        f"{what} of each rank is a sum, divided by a number that is summed over all ranks, and DDP averages over the "
        f"ranks again: {lost.format(f'1/{len(passes[0])}')}.",
        location=line,
        evidence=[f"in all {len(passes)} backward passes that were compared; in the first of them by {total:g}"],
        severity=Severity.WARNING,
        fix="Divide the number by dist.get_world_size(), or multiply the loss by it: DDP averages over the ranks.",
    )


def _judge_counted_again(passes: Losses, together: int, *, summed: bool) -> list[Finding]:
    """Report sums divided by a count that includes each model group's duplicates (DDP303).

    If gradients are averaged, dividing by the global count is also wrong: DDP divides by the number of models again.
    """
    steps: dict[int, list[LossDifferentiated]] = group_by(itertools.chain.from_iterable(passes), lambda one: one.step)
    compared = [
        [term for one in of_step for term in one.terms]
        for of_step in steps.values()
        if all(len(one.terms) == 1 and not one.number for one in of_step)
    ]
    alike = all(len({(term.kind, round(term.factor, 9)) for term in terms}) == 1 for terms in compared)
    if together < 2 or len(compared) < max(FEWEST_PASSES, len(steps)) or not alike or compared[0][0].kind != "sum":
        return []
    models = len(passes[0])
    divided = [1 / (abs(terms[0].factor) * sum(term.count for term in terms)) for terms in compared if terms[0].factor]
    times = round(divided[0] * (1 if summed else models)) if divided else 0
    sizes = {together} if summed else {together, models, together * models}
    if times not in sizes - {1} or any(abs(by * (1 if summed else models) / times - 1) > _TOLERANCE for by in divided):
        return []
    first = passes[0][0]
    again = "" if summed else ", and DDP averages over the replicas again"
    return one_finding(
        "DDP303",
        ("loss",),
        f"The loss is a sum, divided by {divided[0]:.3g} times the number of its elements in all replicas{again}: "
        f"gradients are 1/{times} of those of the mean.",
        location=first.scaled or first.made or first.location,
        evidence=[
            f"in all {len(compared)} backward passes that were compared",
            f"{together} ranks compute one model together, and have the same elements",
        ],
        severity=Severity.WARNING,
        fix="Sum the number over the data dimension of the mesh only"
        + ("." if summed else ", and multiply the loss by the size of that, over which DDP averages."),
    )


def _divided_by(of_ranks: Sequence[LossDifferentiated]) -> tuple[float, Location | None, bool] | None:
    """Return the reduced total that divides all sums, and its line.

    A mean times the rank's own addend counts as a sum. The third item is True if other terms are means.
    """
    size = float(len(of_ranks))
    if any(one.hooked for one in of_ranks):
        return None
    for numbers in zip(*([number for number in one.reduced if not number.members] for one in of_ranks), strict=False):
        total = sum(number.value for number in numbers)
        of_rank = [
            (term, term.kind == "sum" or _is_among(number.value, term.multipliers))
            for number, one in zip(numbers, of_ranks, strict=True)
            for term in one.terms
            if term.factor
        ]
        sums = [term for term, is_sum in of_rank if is_sum]
        by_size = all(size in term.multipliers for term in sums) or any(size in term.divisors for term, _ in of_rank)
        if len({number.location for number in numbers}) > 1 or by_size or not all(map(_is_all_known, sums)):
            continue
        if total > 1 and all(_is_among(total, term.divisors) for term in sums):
            return total, numbers[0].location, len(sums) < len(of_rank)
    return None


def _is_among(number: float, others: Sequence[float]) -> bool:
    return any(map(partial(is_near, number), others))


def _is_all_known(term: ScaledTerm) -> bool:
    """Check if a term's divisors and multipliers explain its factor."""
    known = math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf)
    return bool(term.divisors) and is_near(abs(known), abs(term.factor))


def is_near(one: float, other: float) -> bool:
    """Check if two numbers are equal within rounding."""
    return abs(one - other) < _TOLERANCE * abs(one)


def judge_accumulated(losses: Losses) -> list[Finding]:
    """Report micro-batch means that are added up without division (DDP514).

    Backward passes are micro-batches if all come from one line, and either the wrapper averages only after the last
    pass or the script takes a batch for each pass.
    """
    steps: dict[int, list[list[LossDifferentiated]]] = {}
    for rank, of_rank in enumerate(losses):
        for one in of_rank:
            steps.setdefault(one.step, [[] for _ in losses])[rank].append(one)
    before = {step: [of_rank[-1].batches if of_rank else 0 for of_rank in of_ranks] for step, of_ranks in steps.items()}
    before[-1] = [0] * len(losses)
    several = [
        (of_ranks, before.get(step - 1))
        for step, of_ranks in steps.items()
        if all(
            # known batch counts: no loader, one batch per pass, or the previous step was recorded
            len(passes) > 1 and (not passes[-1].batches or step - 1 in before or passes[0].batches < passes[-1].batches)
            for passes in of_ranks
        )
    ]
    undivided = [
        of_ranks
        for of_ranks, taken in several
        if all(_is_undivided(passes, 0 if taken is None else taken[rank]) for rank, passes in enumerate(of_ranks))
    ]
    if len(undivided) < FEWEST_PASSES - 1 or len(undivided) < len(several):
        return []
    passes = undivided[0][0]
    return one_finding(
        "DDP514",
        ("loss",),
        f"The losses of {len(passes)} micro-batches, each a mean, are added up and not divided by their number: the "
        f"gradient of a step is {len(passes)} times that of the same samples in one batch.",
        location=passes[0].uncounted or passes[0].made or passes[0].location,
        evidence=[
            f"nothing divides the means by {len(passes)}, in all {len(undivided)} optimizer steps that were compared",
            "the function is given num_items_in_batch, and does not read it" if passes[0].uncounted else "",
        ],
        severity=Severity.WARNING,
        fix="Divide sums over items by num_items_in_batch; or let the trainer divide by the number of micro-batches "
        "(model_accepts_loss_kwargs = False)."
        if passes[0].uncounted
        else "Divide the loss by the number of micro-batches of the step before backward.",
    )


def _is_undivided(passes: Sequence[LossDifferentiated], before: int) -> bool:
    """Check if backward passes are micro-batches whose losses are undivided means.

    `before`: batches taken when the step began; larger than later counts if a new epoch has begun.
    """
    last, wrappers = passes[-1], set(passes[-1].wrappers)
    kinds = {tuple(term.kind for term in one.terms) for one in passes}
    if not wrappers or len({one.location for one in passes}) > 1 or len(kinds) > 1:
        return False
    own = all(not wrappers.isdisjoint((*one.put_off, *one.wrappers)) for one in passes)
    taken = all(before.batches < after.batches for before, after in itertools.pairwise(passes))
    put_off = all(not wrappers.isdisjoint(one.put_off) for one in passes[:-1])
    fetched = put_off and (last.batches < before or last.batches - before >= len(passes))  # before the first pass
    if not own or not (taken or fetched if last.batches else put_off):
        return False
    weights = [max(one.weighed or map(abs, map(_total, one.terms)), default=0.0) for one in passes]
    scales = {tuple(map(_scales_of_mean, one.terms)) for one in passes}
    divided = any(is_near(1 / len(passes), weight) for one in passes for weight in one.weighed)
    return all(abs(weight - 1.0) < _TOLERANCE for weight in weights) or (
        not divided
        and len(scales) == 1
        and all(one and not _divides(one, len(passes)) for one in scales.pop() or ((),))
    )


def _scales_of_mean(term: ScaledTerm) -> tuple[float, ...]:
    """Return the scales of a mean (or sum over rows), if all are known."""
    rows = next((by for by in term.divisors if by > 1 and not term.count % by), 1.0) if term.kind == "sum" else 1.0
    by = [number for number in term.divisors if number not in (rows, 0.0)]
    known = is_near(math.prod(term.multipliers) / math.prod(by) / rows, abs(term.factor))
    return (
        (1.0, *term.multipliers, *(1 / number for number in by)) if known and (rows > 1 or term.kind == "mean") else ()
    )


def _divides(scales: Sequence[float], count: int) -> bool:
    """Check if a product of some scales is 1 / `count`."""
    chosen = itertools.chain.from_iterable(itertools.combinations(scales[:8], n) for n in range(1, 9))
    return any(is_near(1 / count, math.prod(some)) for some in chosen)


def _total(term: ScaledTerm) -> float:
    """Return the total weight of a term's elements."""
    return term.factor * (term.count if term.kind == "sum" else 1)


def _judge_counts(passes: Losses) -> list[Finding]:
    """Report sums that each rank divides by its own number (DDP305)."""
    for weight in _WEIGHTS:
        every = [_own_counts(of_ranks, weight) for of_ranks in passes]
        unequal = [counts for counts in every if counts]
        distinct = len({tuple(counts) for counts in unequal})  # else a weight may yield integers by chance
        if (
            len(unequal) >= FEWEST_PASSES
            and 2 * len(unequal) > len(passes)
            and (weight == 1.0 or distinct >= FEWEST_PASSES)
        ):
            return _unequal_counts(passes, every, unequal)
    return []


def _unequal_counts(passes: Losses, every: Sequence[list[float]], unequal: Sequence[list[float]]) -> list[Finding]:
    summed = _line_of_sums(*next(pair for pair in zip(passes, every, strict=True) if pair[1]))
    own = "a number that is summed over some of the ranks only" if summed else "its own number of elements"
    return one_finding(
        "DDP305",
        ("loss",),
        f"The loss of each rank is divided by {own}, and the numbers differ, so the average over ranks is a mean of "
        "means and not that of all elements of the step.",
        location=summed or _line_of_counts(passes) or passes[0][0].made or passes[0][0].location,
        evidence=[
            f"in {len(unequal)} of {len(passes)} backward passes that were compared; in the first of them "
            + ", ".join(f"by {count:.0f} on rank {rank}" for rank, count in enumerate(unequal[0]))
        ],
        severity=severity_of_weights([[1 / n for n in counts] or [1.0] * len(passes[0]) for counts in every]),
        fix="all_reduce the numbers, and divide by their sum / world_size, for the gradients are averaged.",
    )


def _line_of_sums(of_ranks: Sequence[LossDifferentiated], counts: Sequence[float]) -> Location | None:
    """Return the all_reduce over some ranks that makes each rank's divisor."""
    for numbers in zip(*([number for number in one.reduced if number.members] for one in of_ranks), strict=False):
        sums = [sum(one.value for rank, one in enumerate(numbers) if rank in own.members) for own in numbers]
        line: Location | None = numbers[0].location
        if all(map(is_near, counts, sums)):
            return line
    return None


def _line_of_counts(passes: Losses) -> Location | None:
    """Return the line of the only term whose count or factor differs."""
    lines = {
        terms[0].location
        for of_ranks in passes
        for terms in zip(*(one.terms for one in of_ranks), strict=False)
        if len({(term.count, round(term.factor, 9)) for term in terms}) > 1
    }
    return lines.pop() if len(lines) == 1 else None


def _own_counts(of_ranks: Sequence[LossDifferentiated], weight: float) -> list[float]:
    """Return the integer divisors of a sum by rank, if ranks differ."""
    of_samples = set().union(*map(_of_samples, of_ranks))
    for terms in zip(*(one.terms for one in of_ranks), strict=False):
        if any(term.head in of_samples for term in terms):
            continue
        counts = [_divisor(term, weight, terms[0].factor) for term in terms]
        if min(counts) >= 1 and max(counts) > min(counts) * (1 + _UNEQUAL):
            if max(counts) < _LARGEST and all(abs(count - round(count)) < _WHOLE for count in counts):
                return counts
    return []


def _of_samples(one: LossDifferentiated) -> set[int | None]:
    """Return heads whose per-sample terms have different divisors."""
    by_head = group_by((term for term in one.terms if term.head is not None), lambda term: term.head)
    return {head for head, terms in by_head.items() if len({round(term.factor, 9) for term in terms}) > 1}


def _divisor(term: ScaledTerm, weight: float, factor: float) -> float:
    """Return the divisor of a sum, or of a mean relative to `factor`."""
    if term.kind == "mean":
        return term.count * abs(factor / term.factor) if term.chosen and term.factor else 0.0
    return weight / abs(term.factor) if term.factor else 0.0
