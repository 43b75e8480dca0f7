"""DDP305 loss-normalisation: error, gradients_differ, keeps_results

Gradients differ from the single process because the loss is a sum, or a mean over a count that differs between ranks.

Why: DDP gives every rank the same weight. So a sum over samples is divided by the world size. A mean over counts that
    differ (uneven shards, padding masks, ignore_index, weights of samples) becomes a mean of means: a sample counts
    more on a rank with fewer samples. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
Fix: Sum the local loss, all_reduce the count, and divide by count / world_size on every rank.
Detected: DDP gives the gradient of every rank the same weight. DDP305 is reported if the gradient of the global batch
    is a weighted sum of the ranks' gradients, and the weights differ between ranks. DDP305 is also reported if the
    loss weighs samples by values of the rank's own batch, such as class frequencies. The finding names the count that
    each rank divides by, if ddpcheck finds it. `ddpcheck run` measures how much each target counts in the loss. It
    also reports a term of the loss that each rank multiplies by its own constant.
Ignore: If each rank should have the same weight, however many samples it has. A sum is always an error. A mean of
    means is only a warning if its effect is small. In `ddpcheck report`, the effect is small if every gradient is
    within 5 % of the global batch's. In a training loop, the effect is large in two cases: (1) In at least half of
    the steps, an element of the loss (a sample or token) counts at least twice as much on one rank as on another. (2)
    In each of at least five steps, the elements of one rank count more than those of another, always of the same two
    ranks, and by at least 10 % on average. Counts that differ by chance, as with padded batches, favour no rank, and
    many people train this way on purpose.
Line: The line that computes the term of the loss, or the loss. If each rank divides by a sum over some of the ranks,
    the all_reduce.
Checks: report parity; run loop, loss, optimizers; repro single-process
Repeats: Losses, Optimizers
Reports: pytorch/pytorch#37359 huggingface/transformers#24725
Example:
    loss = (token_loss * mask).sum() / mask.sum()
    # right: total = mask.sum(); dist.all_reduce(total)
    #        loss = (token_loss * mask).sum() * dist.get_world_size() / total
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from ddpcheck.findings.errors import NonFiniteLossError, RankFailure
from ddpcheck.findings.evidence.gradients import LossTerm
from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, new_finding, plural_verb
from ddpcheck.stream.rank_report import MicroBatch, RankReport
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.factors import is_near
from ddpcheck.trace.losses import FEWEST_PASSES, Passes, UnequalTargets, format_term

LEAST_ERROR = 0.05
"""Relative error of gradients against the global batch from which a mean of means is an error."""

MIN_MEDIAN_RATIO = 2.0
"""Ratio of the weights of elements on two ranks, in half of the steps, from which a mean of means is an error."""

MIN_AVERAGE_RATIO = 1.1
"""Ratio of average weights, if one rank's are larger in each step, from which a mean of means is an error."""

FEWEST_ORDERED_STEPS = 5
"""Steps in each of which one rank's weights are larger; by chance, one of two ranks leads in all (probability 1/16)."""

MIN_COUNT_DIFFERENCE = 0.02  # difference of counts, relative to the smallest
INTEGER_TOLERANCE = 0.02  # distance from the nearest integer
LARGEST_COUNT = 1e5  # largest count recognizable as an integer from a float32 inverse
TERM_WEIGHTS = (1.0, 0.5, 0.25, 0.2, 0.1, *map(float, range(2, 11)))  # weights of one term in a loss of several terms
FEWEST_CONSTANT_PASSES, FEWEST_DRIFTING_PASSES = 3, 8  # backward passes with a constant ratio, or a drifting ratio
CONSTANT_TOLERANCE = 1e-4  # relative difference below which numbers are equal
SMALLEST_LOG_RATIO = 0.01
LARGEST_DRIFT = 0.25  # relative change of the log ratio between passes

BY_SAMPLE = "random numbers by sample"
"""Tag of a DDP305 found with random numbers fixed per sample."""


def judge_undefined_losses(
    failures: Sequence[RankFailure], batch_loss: float, step: int, world_size: int
) -> list[Finding]:
    """DDP305: non-finite loss on some ranks, although the whole-batch loss is finite."""
    undefined = {f.rank: f for f in failures if isinstance(f.exception, NonFiniteLossError)}
    if not undefined or len(undefined) == world_size or not math.isfinite(batch_loss):
        return []
    ranks = sorted(undefined)
    return new_finding(
        "DDP305",
        ("loss",),
        f"The loss is not finite on {format_ranks(ranks)} in step {step}; that of the whole batch is {batch_loss:.4g}. "
        f"The loss is a mean over elements of which {plural_verb('this rank has', 'these ranks have', ranks)} none, "
        "or a statistic of too few samples.",
        ranks=ranks,
        steps=(step,),
        location=Location.parse(undefined[ranks[0]].location),
        evidence=[f"rank {rank}: {failure.exception}" for rank, failure in sorted(undefined.items())],
        fix="Sum the local loss, all_reduce the count, and divide by count / world_size on every rank: a rank without "
        "an element that counts then adds 0.",
    )


def judge_normalisation(facts: SingleProcessFacts, wrong: Sequence[LossTerm]) -> list[Finding]:
    """Report loss terms that are sums, or means over rank-dependent counts (DDP305)."""
    world_size, sizes, wrapper = facts.known.world_size, facts.known.local.shard_sizes, facts.known.wrapper.named
    by_sample = facts.analysis.numbers == "by sample"
    worst_first = sorted(wrong, key=lambda term: -term.error)
    is_summed = [term.doubles_with_batch or (world_size > 1 and term.is_sum) for term in worst_first]
    reasons: dict[str, str] = {}
    for term, summed in zip(worst_first, is_summed, strict=True):
        name = format_term(term, facts.analysis.terms)
        if summed:
            message = (
                f"{name} sums over samples, and {wrapper} averages over ranks: its gradient is "
                f"{'' if term.is_sum else 'about '}1/{world_size} of the global batch's"
            )
            detail = (
                "the gradients of the shards add up to the global batch's"
                if term.is_sum
                else "its gradient doubles when every sample is in the batch twice"
            )
        else:
            message = (
                f"{name} is normalised by a count that differs between ranks, so the mean of the ranks' gradients is "
                "not the gradient of the global batch"
            )
            weights, rank_weights = (", ".join(f"{w:.4g}" for w in ws) for ws in (term.weights, term.rank_weights))
            detail = f"the global batch weighs the ranks by {weights}; {wrapper} weighs "
            detail += f"the ranks by {rank_weights}" if rank_weights else f"each by {1 / world_size:.4g}"
            if term.count not in ("", "samples"):
                detail = f"{term.count}: {' and '.join(f'{count:g}' for count in term.counts)} on the ranks; {detail}"
            elif not term.count and by_sample:
                detail += "; no count in the batch fits: the counted elements are chosen in the step, by a random mask "
                detail += "for example"
        reasons.setdefault(message, detail)
    (first, reason), *others = reasons.items()
    return facts.new_finding(
        "DDP305",
        f"{capitalized(first)}.",
        reason,
        *(f"{text}: {explanation}" for text, explanation in others),
        f"samples a rank: {', '.join(map(str, sizes))}" if len(set(sizes)) > 1 else "",
        location=worst_first[0].location or facts.known.loss_location,
        fix="Divide by the number of samples on the rank (reduction='mean'), or keep the sum and multiply this term "
        f"by {facts.known.count_of_replicas}."
        if is_summed[0]
        else "",
        severity=None if any(is_summed) else _severity_by_error(facts),
        tags=(BY_SAMPLE,) if by_sample else (),
    )


def _severity_by_error(facts: SingleProcessFacts) -> Severity | None:
    return None if facts.largest_error_of_steps >= LEAST_ERROR else Severity.WARNING


def explain_by_common_weight(facts: SingleProcessFacts) -> list[Finding]:
    """Report gradients that are a constant times the correct gradients, without another explanation (DDP305)."""
    if not facts.has_common_factor:
        return []
    weight = 1 / (facts.known.world_size * facts.analysis.against_global.ratio)
    return judge_normalisation(facts, [LossTerm(weights=(weight,) * facts.known.world_size)])


def explain_by_batch_weights(facts: SingleProcessFacts, terms: Sequence[LossTerm]) -> list[Finding]:
    """Report sample weights computed from the local batch, if samples are not coupled (DDP305)."""
    coupled = facts.known.local.differing_buffers or any(term.coupled is not False for term in terms)
    if coupled or facts.analysis.error or facts.world_changed:
        return []
    return facts.new_finding(
        "DDP305",
        "The loss weighs samples by a quantity of the local batch that differs between ranks (such as class "
        "frequencies), so the mean of the ranks' gradients is not the gradient of the global batch.",
        "a shard gives these gradients in a single process too, and no count of its samples explains them",
        "the gradients of samples do not change with the outputs of the model for others",
        location=next((term.location for term in terms if term.location), None) or facts.known.loss_location,
        severity=_severity_by_error(facts),
        fix="all_reduce the values that the weights are computed from (such as the number of samples of each class), "
        "or compute the weights once for the dataset.",
    )


def normalising_line_finding(facts: SingleProcessFacts) -> list[Finding]:
    """Report the loss line that normalises by a value of the local batch (DDP305)."""
    return facts.new_finding(
        "DDP305",
        "The loss is normalised by a quantity of the local batch that differs between ranks, so the mean of the ranks' "
        "gradients is not the gradient of the global batch.",
        f"the result of {facts.analysis.coupling.line} for a sample has a different scale in the global batch",
        location=facts.analysis.coupling.line,
        severity=_severity_by_error(facts),
    )


def _counts_finding(passes: Passes, all_counts: Sequence[list[float]], unequal: Sequence[list[float]]) -> list[Finding]:
    line = _line_of_sums(*next(pair for pair in zip(passes, all_counts, strict=True) if pair[1]))
    number = "a number that is summed over some of the ranks only" if line else "its own number of elements"
    return new_finding(
        "DDP305",
        ("loss",),
        f"The loss of each rank is divided by {number}, and the numbers differ, so the average over ranks is a mean of "
        "means and not that of all elements of the step.",
        location=line or _line_of_counts(passes) or passes[0][0].computed_at or passes[0][0].location,
        evidence=[
            f"in {len(unequal)} of {len(passes)} backward passes that were compared; in the first of them "
            + ", ".join(f"by {count:.0f} on rank {rank}" for rank, count in enumerate(unequal[0]))
        ],
        severity=severity_of_weights([[1 / n for n in counts] or [1.0] * len(passes[0]) for counts in all_counts]),
        fix="all_reduce the numbers, and divide by their sum / world_size, for the gradients are averaged.",
    )


def _line_of_sums(losses: Sequence[LossDifferentiated], counts: Sequence[float]) -> Location | None:
    """Return the line of a subgroup all_reduce whose results equal the divisors `counts`."""
    for numbers in zip(
        *([number for number in loss.allreduce_inputs if number.members] for loss in losses), strict=False
    ):
        sums = [sum(number.value for r, number in enumerate(numbers) if r in reduced.members) for reduced in numbers]
        line: Location | None = numbers[0].location
        if all(map(is_near, counts, sums)):
            return line
    return None


def _line_of_counts(passes: Passes) -> Location | None:
    """Return the only line whose loss terms differ between ranks in count or factor."""
    lines = {
        terms[0].location
        for by_rank in passes
        for terms in zip(*(loss.terms for loss in by_rank), strict=False)
        if len({(term.count, round(term.factor, 9)) for term in terms}) > 1
    }
    return lines.pop() if len(lines) == 1 else None


def judge_rank_weights(passes: Passes) -> list[Finding]:
    """Report a loss term that each rank multiplies by its own weight (DDP305)."""
    shapes = {tuple(term.kind for term in loss.terms) for by_rank in passes for loss in by_rank}
    for index in range(len(next(iter(shapes))) if len(shapes) == 1 else 0):
        terms = [[loss.terms[index] for loss in by_rank] for by_rank in passes]
        weights = [[_known_weight(term) for term in by_rank] for by_rank in terms]
        elements = [[abs(t.factor) / ((t.kind == "mean" and t.count) or 1) for t in by_rank] for by_rank in terms]
        if not all(map(all, weights)) or not all(_keeps_ratio(numbers) for numbers in (weights, elements)):
            continue
        first, first_loss = terms[0][0], passes[0][0]
        text = ", ".join(f"by {weight:.4g} on rank {rank}" for rank, weight in enumerate(weights[-1]))
        return new_finding(
            "DDP305",
            ("loss",),
            "Each rank multiplies a term of the loss by a different number, which it keeps from step to step: samples "
            "of one rank count more than those of another.",
            location=first.location or first_loss.scaled_at or first_loss.computed_at or first_loss.location,
            evidence=[f"in all {len(passes)} backward passes that were compared; in the last of them {text}"],
            severity=Severity.WARNING,
            fix="all_reduce the number, or the values that it is computed from, so that it is the same on every rank.",
        )
    return []


def _known_weight(term: ScaledTerm) -> float:
    """Return a loss term's factor if recorded multipliers and divisors explain it, else 0."""
    known = abs(math.prod(term.multipliers) / (math.prod(term.divisors) or math.inf))
    return known if abs(known - abs(term.factor)) < CONSTANT_TOLERANCE * known else 0.0


def _keeps_ratio(numbers: Sequence[Sequence[float]]) -> bool:
    """Return True if one rank's numbers stay proportional to rank 0's in all passes."""
    for rank in range(1, len(numbers[0])):
        ratios = [math.log(by_rank[rank] / by_rank[0]) for by_rank in numbers]
        changes = [abs(after - before) for before, after in itertools.pairwise(ratios)]
        typical, fewest = (
            median(map(abs, ratios)),
            FEWEST_CONSTANT_PASSES if max(changes, default=0.0) < CONSTANT_TOLERANCE else FEWEST_DRIFTING_PASSES,
        )
        if len(ratios) >= fewest and typical > SMALLEST_LOG_RATIO and len({ratio > 0 for ratio in ratios}) == 1:
            if median(changes) < LARGEST_DRIFT * typical:
                return True
    return False


def judge_targets_of_ranks(unequal: UnequalTargets) -> list[Finding]:
    """Report weights of targets that differ between ranks, not between micro-batches (DDP305)."""
    if unequal.is_in_rank:
        return []
    return new_finding(
        "DDP305",
        ("loss",),
        "The loss of each rank is divided by its own number of targets, and the numbers differ, so the average over "
        "ranks is a mean of means and not that of all targets of the step.",
        severity=severity_of_targets(unequal.history),
        **unequal.describe(),
    )


def severity_of_targets(ranks: Sequence[Sequence[MicroBatch]]) -> Severity:
    """Return the severity of unequal weights that ranks give to targets of the loss."""
    steps: dict[tuple[int, str], dict[int, list[MicroBatch]]] = {}
    for rank, items in enumerate(ranks):
        for item in dict.fromkeys(items):
            if item.counted and item.weight:
                steps.setdefault((item.index, item.head), {}).setdefault(rank, []).append(item)
    weights = [
        [sum(b.weight * b.counted for b in batches) / sum(b.counted for b in batches) for batches in by_rank.values()]
        for by_rank in steps.values()
        if len(by_rank) == len(ranks)
    ]
    return severity_of_weights(weights)


def severity_of_weights(steps: Sequence[Sequence[float]]) -> Severity:
    """Return the severity of the ranks' unequal loss weights (`steps`: by step and rank)."""
    steps = [step for step in steps if step and min(step) > 0]
    if not steps:
        return Severity.WARNING
    if median(max(step) / min(step) for step in steps) >= MIN_MEDIAN_RATIO:
        return Severity.ERROR
    shares = [[weight / sum(step) for weight in step] for step in steps]
    average = [sum(rank_weights) / len(shares) for rank_weights in zip(*shares, strict=True)]
    heaviest, lightest = average.index(max(average)), average.index(min(average))
    always = len(shares) >= FEWEST_ORDERED_STEPS and all(share[heaviest] > share[lightest] for share in shares)
    return Severity.ERROR if always and average[heaviest] >= MIN_AVERAGE_RATIO * average[lightest] else Severity.WARNING


def judge_counts(passes: Passes) -> list[Finding]:
    """Report sums that each rank divides by its own number of elements (DDP305)."""
    for weight in TERM_WEIGHTS:
        all_counts = [_rank_counts(by_rank, weight) for by_rank in passes]
        unequal = [counts for counts in all_counts if counts]
        distinct = len({tuple(counts) for counts in unequal})  # else a weight may yield integers by chance
        if (
            len(unequal) >= FEWEST_PASSES
            and 2 * len(unequal) > len(passes)
            and (weight == 1.0 or distinct >= FEWEST_PASSES)
        ):
            return _counts_finding(passes, all_counts, unequal)
    return []


def _rank_counts(losses: Sequence[LossDifferentiated], weight: float) -> list[float]:
    """Return the different integers by which ranks divide a loss sum, or []."""
    sample_heads = set().union(*map(_heads_by_sample, losses))
    for terms in zip(*(loss.terms for loss in losses), strict=False):
        if any(term.head in sample_heads for term in terms):
            continue
        counts = [_divisor(term, weight, terms[0].factor) for term in terms]
        if min(counts) >= 1 and max(counts) > min(counts) * (1 + MIN_COUNT_DIFFERENCE):
            if max(counts) < LARGEST_COUNT and all(abs(count - round(count)) < INTEGER_TOLERANCE for count in counts):
                return counts
    return []


def _heads_by_sample(loss: LossDifferentiated) -> set[int | None]:
    """Return the heads (`ScaledTerm.head`) whose terms have a separate weight for each sample."""
    by_head = group_by((term for term in loss.terms if term.head is not None), lambda term: term.head)
    return {head for head, terms in by_head.items() if len({round(term.factor, 9) for term in terms}) > 1}


def _divisor(term: ScaledTerm, weight: float, factor: float) -> float:
    """Return the number by which a loss term divides its sum, or 0.

    `weight`: factor of an undivided sum. `factor`: factor of a mean on rank 0.
    """
    if term.kind == "mean":
        return term.count * abs(factor / term.factor) if term.is_selected and term.factor else 0.0
    return weight / abs(term.factor) if term.factor else 0.0


def settle_severity(finding: Finding, reports: Sequence[Sequence[RankReport]]) -> Finding:
    """Set the severity of a DDP305 from all reported steps; return other findings unchanged."""
    if finding.code != "DDP305":
        return finding
    batches = [[batch for report in rank_reports for batch in report.micro_batches] for rank_reports in reports]
    return replace(finding, severity=severity_of_targets(batches))
