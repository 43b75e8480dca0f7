"""Judges of the scale and normalisation of losses in a script."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by, one_finding
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_scale, judge_shared
from ddpcheck.rules.loss.ddp305_loss_normalisation import judge_counts, judge_own_weights
from ddpcheck.trace.losses import FEWEST_PASSES, SCALE_TOLERANCE, Losses

LEAST_OF_GRADIENT = 0.05
"""Relative error against the global batch from which a mismatch is an error."""


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
    findings = [] if is_partial or summed else judge_scale(passes, together) or judge_shared(passes)
    findings = findings or _judge_counted_again(passes, together, summed=summed)
    return findings or judge_counts(passes) or judge_own_weights(passes)


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
