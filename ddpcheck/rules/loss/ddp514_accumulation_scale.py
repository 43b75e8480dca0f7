"""DDP514 accumulation-scale: error, keeps_results

Accumulated gradients are not scaled by the number of micro-steps, or by the number of tokens in each.

Why: backward adds gradients up. Without division, the step grows with the number of micro-steps. If the last
    accumulation is shorter but is divided by the same number, its step is too small. If micro-batches have unequal
    numbers of tokens, their mean is a mean of means: tokens of the shorter ones count more.
    (huggingface/transformers#34191 fixed this in one trainer.)
Fix: Divide each micro-step's loss by the number of micro-steps of this accumulation; if micro-batches have unequal
    numbers of tokens, let each loss be a sum over tokens, and divide it by the number of tokens in all micro-batches
    of the accumulation.
Detected: `ddpcheck report` compares the number of backward passes on a rank with the number in a single process.
    DDP514 is reported if the gradient is wrong by the ratio of these numbers. `ddpcheck run` reports DDP514 if the
    loss of each micro-batch is a mean over this micro-batch, and nothing divides these losses by their number. It
    recognises micro-batches by the batches of a loader or by no_sync. All their backward passes must come from one
    line. `ddpcheck run` and `ddpcheck.watch` also measure how much each cross-entropy target counts. They report
    targets that count more because their micro-batch has fewer targets.
Ignore: If the learning rate was tuned with the sum, or if micro-batches should have the same weight, however many
    tokens they have.
Line: The line that computes the loss. If a function ignores the number of items that a trainer passes, this function.
Checks: report parity; run loop, loss; repro single-process
Repeats: Losses
Reports: huggingface/transformers#34191 huggingface/transformers#24725 meta-pytorch/torchtune#1875
Example:
    for part in batch.split(4):
        loss(ddp, part).backward()           # right: (loss(ddp, part) / len(batch.split(4))).backward()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import make_finding, new_finding
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.factors import SCALE_TOLERANCE, is_near
from ddpcheck.trace.losses import FEWEST_PASSES, LossesByRank, UnequalTargets, total_factor


def judge_targets_of_micro_batches(unequal: UnequalTargets) -> list[Finding]:
    """Report targets that weigh more in some micro-batches of a step (DDP514)."""
    if not unequal.is_in_rank:
        return []
    return new_finding(
        "DDP514",
        ("loss",),
        "The loss of each micro-batch is divided by its own number of targets, and the numbers differ, so the "
        "accumulated gradient is a mean of means and not that of all targets of the step.",
        **unequal.describe(),
    )


def micro_batch_mismatch(worst: Difference, count: int) -> Finding:
    """Report a loss whose gradients change with `count` micro-batches, even without DDP (DDP514)."""
    return make_finding(
        "DDP514",
        ("loss",),
        f"even without DDP, the gradients of {count} micro-batches, whose losses are divided by {count}, differ from "
        f"those of the whole batch ({worst}): the loss is not a mean over samples",
    )


def judge_accumulated(losses: LossesByRank) -> list[Finding]:
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
    return new_finding(
        "DDP514",
        ("loss",),
        f"The losses of {len(first)} micro-batches, each a mean, are added up and not divided by their number: the "
        f"gradient of a step is {len(first)} times that of the same samples in one batch.",
        location=first[0].uncounted_at or first[0].computed_at or first[0].location,
        evidence=[
            f"nothing divides the means by {len(first)}, in all {len(undivided)} optimizer steps that were compared",
            "the function is given num_items_in_batch, and does not read it" if first[0].uncounted_at else "",
        ],
        severity=Severity.WARNING,
        fix="Divide sums over items by num_items_in_batch; or let the trainer divide by the number of micro-batches "
        "(model_accepts_loss_kwargs = False)."
        if first[0].uncounted_at
        else "Divide the loss by the number of micro-batches of the step before backward.",
    )


def _is_undivided(passes: Sequence[LossDifferentiated], before: int) -> bool:
    """Return True if backward passes are micro-batches whose losses are undivided means.

    `before`: number of batches taken from the loader before the step; the loader counts from 0 again in a new epoch.
    """
    last, wrappers = passes[-1], set(passes[-1].wrappers)
    kinds = {tuple(term.kind for term in loss.terms) for loss in passes}
    if not wrappers or len({loss.location for loss in passes}) > 1 or len(kinds) > 1:
        return False
    is_wrapped = all(not wrappers.isdisjoint((*loss.late_wrappers, *loss.wrappers)) for loss in passes)
    takes_batches = all(earlier.batches < later.batches for earlier, later in itertools.pairwise(passes))
    put_off = all(not wrappers.isdisjoint(loss.late_wrappers) for loss in passes[:-1])
    prefetched = put_off and (last.batches < before or last.batches - before >= len(passes))  # before the first pass
    if not is_wrapped or not (takes_batches or prefetched if last.batches else put_off):
        return False
    weights = [max(loss.target_weights or map(abs, map(total_factor, loss.terms)), default=0.0) for loss in passes]
    scales = {tuple(map(_scales_of_mean, loss.terms)) for loss in passes}
    divided = any(is_near(1 / len(passes), weight) for loss in passes for weight in loss.target_weights)
    return all(abs(weight - 1.0) < SCALE_TOLERANCE for weight in weights) or (
        not divided
        and len(scales) == 1
        and all(factors and not _has_division_by(factors, len(passes)) for factors in scales.pop() or ((),))
    )


def _scales_of_mean(term: ScaledTerm) -> tuple[float, ...]:
    """Return the numbers that scale a mean in the loss; () for other terms."""
    rows = next((div for div in term.divisors if div > 1 and not term.count % div), 1.0) if term.kind == "sum" else 1.0
    divisors = [div for div in term.divisors if div not in (rows, 0.0)]
    known = is_near(math.prod(term.multipliers) / math.prod(divisors) / rows, abs(term.factor))
    return (
        (1.0, *term.multipliers, *(1 / div for div in divisors)) if known and (rows > 1 or term.kind == "mean") else ()
    )


def _has_division_by(scales: Sequence[float], count: int) -> bool:
    """Return True if a product of some scales is 1 / `count`."""
    subsets = itertools.chain.from_iterable(itertools.combinations(scales[:8], n) for n in range(1, 9))
    return any(is_near(1 / count, math.prod(subset)) for subset in subsets)


def explain_by_micro_batches(facts: SingleProcessFacts) -> list[Finding]:
    """Report accumulation without dividing by the number of micro-batches (DDP514).

    Runs before explanations of other factors: this factor is the ratio of backward passes on a rank and without DDP.
    """
    expected, actual = facts.known.local.backwards
    ratio = facts.analysis.against_global.ratio
    if not facts.scaled or expected == actual or not math.isclose(ratio, actual / expected, rel_tol=1e-2):
        return []
    return facts.new_finding(
        "DDP514",
        "The loss accumulates gradients over micro-batches and does not divide by their number, which differs on a "
        f"rank: the gradient is {ratio:.4g} times the global batch's.",
        f"{expected} backward passes in the single process, {actual} on a rank",
        location=facts.known.loss_location,
    )
