"""DDP303 scaled-gradient: error, spreads, gradients_differ, keeps_results

Every gradient is the reference gradient times a constant, such as the world size or its inverse.

Why: DDP averages gradients over the ranks. If the loss is also divided by the world size, the gradients are divided
    twice. If the loss is multiplied by the world size, or contains an all-reduce, the gradients are multiplied. So
    the effective learning rate changes with the number of ranks. (PyTorch docs, DistributedDataParallel: gradients
    are averaged.)
Fix: Make the loss a mean over the local batch and do not scale it by the world size; for a sum, multiply the loss by
    the world size.
Detected: All gradients differ from the reference by the same factor, within rounding. The reference is a single
    process on the global batch, or the plain average of the ranks' own gradients. `ddpcheck run` looks for the causes
    in the script: (1) The loss is a mean, and the script divides or multiplies it by the world size. (2) The loss is
    a sum divided by a count over all ranks (such as the tokens of the global batch), and is not multiplied by the
    world size. (3) The script scales gradients by the world size, in a hook or after they are averaged. (4) The loss
    covers the features of all ranks, but its gradient reaches only the rank's own features. (5) A script without a
    wrapper sums gradients over the ranks, and does not divide the sum. The steps of some optimizers, such as Adam, do
    not depend on the scale of gradients. With such an optimizer, cases 3 and 4 are mostly not reported. Case 5 is
    then reported only if gradients are clipped.
Ignore: If the learning rate was tuned with this factor. But the factor changes with the number of ranks.
Line: The line that applies the factor: the loss or the gradients are scaled there, or summed by a collective. If this
    line is unknown, the line that computes the loss, or the optimizer step.
Checks: report reducer, parity; run reducer, loss, optimizers; repro single-process
Explains: quietly DDP302 if a note
Reports: neuralmagic/sparseml#135 facebookresearch/3detr#56 ultralytics/ultralytics#18616
Example:
    loss = cross_entropy(model(x), y) / dist.get_world_size()   # DDP divides already; right: no division
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import partial

from ddpcheck.findings.evidence.gradients import LOOSEST_FIT
from ddpcheck.findings.evidence.loop import GradientsHooked
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import capitalized, group_by, new_finding, plural
from ddpcheck.rules.loss.ddp309_collective_without_gradient import describe_lost_factor
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.changes import locate_reduction
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.trace.check_context import SMALLEST_FACTOR, SingleProcessFacts, is_inverse_world_size, values_are_close
from ddpcheck.trace.factors import (
    SCALE_TOLERANCE,
    constant_ratio,
    factor_of_average,
    factor_of_reduced,
    is_near,
    sizes_of_groups,
)
from ddpcheck.trace.gradients import BY_FACTOR, MIN_HOOKED_STEPS, RETURN_AVERAGE, ReducerFacts
from ddpcheck.trace.loop import GradientChanges
from ddpcheck.trace.losses import (
    FEWEST_PASSES,
    SCALE_FREE,
    Losses,
    LossesByRank,
    Passes,
    divided_by,
    format_term,
    total_factor,
)
from ddpcheck.trace.unwrapped_params import are_near

SCALING_METHODS = (  # of a module sharded by fully_shard
    *("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms"),
)


def judge_second_sum(steps: Sequence[Sequence[OptimizerStep]], world_size: int) -> list[Finding]:
    """Detect gradients that an all_reduce sums after DDP has averaged them (DDP303)."""
    summed = [by_rank for by_rank in steps if all(s.averaged and set(s.summed) & set(s.ddp_params) for s in by_rank)]
    if len(summed) < FEWEST_PASSES or len(summed) < len(steps):
        return []
    first = summed[0][0]
    return new_finding(
        "DDP303",
        ("all_reduce",),
        f"DDP has averaged the gradients, and an all_reduce sums them over the ranks again: they are {world_size} "
        "times those of the mean.",
        location=first.summed_at,
        evidence=[
            f"in all {len(summed)} optimizer steps that were compared, of {plural(len(first.summed), 'parameter')}"
        ],
        severity=Severity.WARNING,
        fix="Remove the all_reduce: DDP averages the gradients in backward.",
    )


def judge_sums(steps: Sequence[Sequence[OptimizerStep]], losses: LossesByRank) -> list[Finding]:
    """Detect gradients that the script sums, although the loss is a per-rank mean (DDP303).

    Optimizers that are invariant to gradient scale hide the factor, unless gradients are clipped before the step.
    """
    passes = {loss.step: loss.number + 1 for loss in losses[0]}  # micro-batches by step
    are_means = [
        not loss.wrappers
        and all(term.kind == "mean" for term in loss.terms)
        and any(is_near(1.0, abs(term.factor) * count) for term in loss.terms for count in (1, passes[loss.step]))
        for loss in losses[0]
        if loss.terms
    ]
    known = [by_rank for by_rank in steps if all(step.local for step in by_rank)]
    factors = [factor_of_average(by_rank, by_rank[0].unclipped or by_rank[0].gradients) for by_rank in known]
    size = len(steps[0]) if steps else 0
    summed_steps = [by_rank for by_rank, factor in zip(known, factors, strict=True) if is_near(size, factor)]
    are_equal = (are_near([step.local.get(n, ()) for step in by_rank]) for by_rank in known for n in by_rank[0].local)
    if not summed_steps and all(are_equal):  # as left by backward: reduced by hooks
        summed_steps = [by_rank for by_rank in steps if all(step.summed for step in by_rank)]  # by hooks, in backward
        summed_steps = summed_steps if len(summed_steps) == len(steps) else []
    if size < 2 or len(summed_steps) < FEWEST_PASSES or len(are_means) < FEWEST_PASSES or not all(are_means):
        return []
    first = summed_steps[0][0]
    kind = first.options.get("class", "")
    scale_free = kind.startswith(SCALE_FREE)
    is_exact = not scale_free and first.options.get("module", "").startswith("torch.")  # others may divide in step()
    clipped = [by_rank for by_rank in known if not is_near(size, factor_of_average(by_rank, by_rank[0].gradients))]
    if max(factors, default=0.0) > size * (1 + SCALE_TOLERANCE) or (scale_free and not clipped):
        return []
    note = f"steps of {kind} do not depend on the factor, but clipping before them does, in {len(clipped)} of them"
    return new_finding(
        "DDP303",
        ("all_reduce",),
        f"Gradients are summed over the ranks and not divided by their number: they are {size} times those of the mean "
        "over all samples.",
        location=first.summed_at or first.location,
        evidence=[
            f"in {len(summed_steps)} of the {len(known or steps)} optimizer steps that were compared",
            "the loss is a mean over the samples of a rank",
            note if scale_free else "",
        ],
        severity=None if is_exact else Severity.WARNING,
        fix="Divide by dist.get_world_size() after the all_reduce, or reduce with dist.ReduceOp.AVG if the backend has "
        "it.",
    )


def explain_by_constant_factor(facts: ReducerFacts) -> list[Finding]:
    """Report mismatched gradients that are all one factor times the average (DDP303).

    Runs before explanations by hooks and buffers, which do not leave the same factor on every parameter.
    """
    ratio = constant_ratio(facts.mismatches)
    if ratio is None:
        return []
    scaled = [event for event in facts.evidence[0].events if event.kind in SCALING_METHODS]
    return facts.mismatch(
        "DDP303",
        f"Under the wrapper, each gradient below is {facts.known.factor(ratio)} times the average of the ranks' own "
        "gradients.",
        *(f"{event.kind} is called there" for event in scaled[-1:]),
        location=Location.parse(scaled[-1].location) if scaled else None,
        fix=RETURN_AVERAGE
        if facts.known.wrapper.comm_hook
        else "Leave out set_gradient_divide_factor, or give it the number of ranks."
        if facts.known.wrapper.sharded
        else "Average once: the wrapper of the model, or a hook on its parameters, scales gradients that are already "
        "averaged, or adds them up.",
        tags=(BY_FACTOR,),
    )


def judge_scaled_by_hooks(
    hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int], parameters: Collection[str]
) -> list[Finding]:
    """Report hooks that scale all gradients by the world size or its inverse (DDP303)."""
    size, wanted = len(hooks), set(steps)
    if len(steps) < MIN_HOOKED_STEPS or any(wanted - {hook.step for hook in rank_hooks} for rank_hooks in hooks):
        return []
    passes = [hook.changed for rank_hooks in hooks for hook in rank_hooks if hook.step in wanted]
    known = [change for changed in passes for change in changed.values() if change.kind]  # others are too small
    if not known or not parameters or not all(changed.keys() >= set(parameters) for changed in passes):
        return []
    factor = size if known[0].number > 1 else 1 / size
    if any(c.kind != "scaled" or not math.isclose(c.number, factor, rel_tol=SCALE_TOLERANCE) for c in known):
        return []
    words = f"{size} (the world size)" if factor > 1 else f"1/{size} (one over the world size)"
    return new_finding(
        "DDP303",
        sorted(parameters),
        f"A hook multiplies the gradients of each rank by {words}, and DDP averages over the ranks: the optimizer uses "
        f"{factor:.4g} times the gradient of the mean.",
        location=next((hook.location for rank_hooks in hooks for hook in rank_hooks if hook.location), None),
        evidence=[f"in all {len(steps)} steps that were compared, on every rank"],
        fix="Remove the hook: DDP already averages the gradients.",
        tags=(BY_FACTOR,),
    )


@rule
def judge_rescaled_gradients(changes: GradientChanges) -> list[Finding]:
    """Report gradients scaled after averaging (DDP303), unless the script also changes gradients before averaging."""
    if changes.local_clips or changes.changes_while_accumulating:
        return []
    return [f for used in changes.reduced for f in judge_rescaled(used, changes.losses, len(changes.losses))]


def judge_rescaled(
    used: Sequence[Sequence[tuple[OptimizerStep, ReplicaCaptured]]], losses: LossesByRank, size: int
) -> list[Finding]:
    """Report averaged gradients scaled by the world size or its inverse (DDP303).

    `used`: optimizer steps by rank, each with the state after the last reduction. Requires a measured factor and a line
    that scales by the world size, because a factor such as 1/2 may be intended. Losses that are also scaled by the
    world size, and optimizers invariant to gradient scale, are left out.
    """
    all_losses = [loss for rank_losses in losses for loss in rank_losses]
    if size < 2 or not all(used) or not all_losses or any(loss.scaled_at for loss in all_losses):
        return []
    first = used[0][0][0]
    if first.rescaled_at is None or first.options.get("class", "").startswith(SCALE_FREE):
        return []
    factors = [factor_of_reduced(step, captured) for rank_steps in used for step, captured in rank_steps]
    known = [factor for factor in factors if factor is not None]
    if (
        len(known) < FEWEST_PASSES * len(used)
        or not math.isclose(abs(math.log(known[0], size)), 1, rel_tol=SCALE_TOLERANCE)
        or not all(math.isclose(factor, known[0], rel_tol=SCALE_TOLERANCE) for factor in known)
    ):
        return []
    divided = known[0] < 1
    return new_finding(
        "DDP303",
        ("gradients",),
        f"The gradients that DDP has averaged are {'divided' if divided else 'multiplied'} by the number of ranks "
        f"before the optimizer uses them, which are {f'1/{size} of' if divided else f'{size} times'} the average then.",
        location=first.rescaled_at,
        evidence=[
            f"in all {len(known) // len(used)} steps that were compared, on every rank: a norm of {known[0]:.6g} times "
            "that of the average"
        ],
        related={"optimizer steps": first.location},
        severity=Severity.WARNING,
        fix="Leave out the factor of dist.get_world_size(): DDP has divided the sum of the gradients by it.",
    )


def explain_by_common_factor(facts: SingleProcessFacts) -> list[Finding]:
    """Report gradients that all differ from correct gradients by the same factor (DDP303).

    If a single process gets shard gradients without this factor, the script scales by the world size; otherwise loss
    values show the cause. Runs before explanations by differences between ranks: the factor is equal on all ranks.
    """
    analysis, known, wrapper = facts.analysis, facts.known, facts.known.wrapper.named
    ratio = analysis.against_global.ratio
    if facts.world_changed and facts.is_factor(analysis.against_shards):
        return _world_size_factor_finding(facts, analysis.against_shards.ratio)
    if not facts.has_common_factor:
        return []
    if facts.losses_are_scaled:
        return _world_size_factor_finding(facts, ratio)
    if known.local.losses and values_are_close(known.local.losses, [analysis.global_loss] * len(known.local.losses)):
        return facts.new_finding(
            "DDP303",
            f"Every gradient is {known.factor(ratio)} times the global batch's: each rank computes the loss of the "
            f"whole batch, its gradient reaches the rank's own samples only, and {wrapper} averages.",
            f"every rank's loss is {analysis.global_loss:.4g}, that of the global batch",
            *(f"gathered by {call}" for call in known.local.calls[:2]),
            location=known.loss_location,
            fix=f"Multiply the loss by {known.count_of_replicas}, or gather with "
            "torch.distributed.nn.functional.all_gather, whose backward adds up the gradients of all ranks.",
        )
    return []


def explain_by_rank_weights(facts: SingleProcessFacts) -> list[Finding]:
    """Report ranks that multiply their gradients by a rank-dependent factor (DDP303).

    Runs before explanations by collectives: one factor for each rank, if it fits exactly, rules out other causes.
    """
    if not facts.world_changed or facts.analysis.rank_weights.residual > facts.tolerance:
        return []
    if all(term.rank_weights and term.error <= facts.tolerance for term in facts.analysis.terms):
        return []  # weights fit the global batch: another cause
    share = ", ".join(f"{weight:.4g}" for weight in facts.analysis.rank_weights.weights)
    return facts.new_finding(
        "DDP303",
        f"The ranks weigh their gradients by {share} and not by {1 / facts.known.world_size:.4g} each: the loss "
        "or the model applies a factor that depends on the rank.",
        fix="Take the factor that depends on the rank out of the loss and the model.",
    )


def explain_by_factors_of_terms(facts: SingleProcessFacts) -> list[Finding]:
    """Report loss terms whose gradient is a constant times the single-process gradient (DDP303).

    Requires that a shard's gradients change without a process group. Runs after non-differentiable collectives.
    """
    analysis = facts.analysis
    scaled = [term for term in analysis.terms if abs(term.ratio - 1) > max(facts.tolerance, SMALLEST_FACTOR)]
    most = max((abs(term.ratio - 1) for term in scaled), default=0.0)
    if not facts.world_changed or not scaled or analysis.terms_residual > max(facts.tolerance, LOOSEST_FIT * most):
        return []
    messages = (
        f"the gradient of {format_term(term, analysis.terms)} is "
        f"{facts.known.factor(term.ratio)} times the global batch's"
        for term in scaled
    )
    message, *others = dict.fromkeys(messages)
    averages = f"{facts.known.wrapper.named} averages already"
    gathers = [call for call in facts.known.local.calls if call.differentiable and "gather" in call.operation]
    if gathers and all(is_inverse_world_size(facts, term.ratio) for term in scaled):
        return facts.new_finding(
            "DDP303",
            f"{capitalized(message)}: the function that calls {gathers[0]} returns the rank's own part of the gradient "
            f"instead of the sum over ranks, or the term is divided by the world size, and {averages}.",
            *others,
            location=Location.parse(gathers[0].location) or scaled[0].location,
            fix="Add up the gradients of all ranks in the backward of that function, as "
            "torch.distributed.nn.functional.all_gather does; or take the world size out of the loss.",
        )
    return facts.new_finding(
        "DDP303",
        f"{capitalized(message)}: its divisor is counted over all ranks, or scaled by the world size, and {averages}.",
        *others,
        location=scaled[0].location or facts.known.loss_location,
    )


def _world_size_factor_finding(facts: SingleProcessFacts, ratio: float) -> list[Finding]:
    factor, wrapper = facts.known.factor(ratio), facts.known.wrapper.named
    locations = [term.location for term in facts.analysis.terms]
    return facts.new_finding(
        "DDP303",
        f"Every gradient is {factor} times that of the same shards without a process group: the model or the loss "
        f"scales by the world size, and {wrapper} averages already.",
        *dict.fromkeys(f"called in forward: {call}" for call in facts.known.local.calls[:3] if call.elements > 0),
        location=(locations[0] if len(locations) == 1 else None) or facts.known.loss_location,
        fix=f"Take the factor {ratio:.4g} out of the loss (a division or multiplication by the world size, or an "
        f"all-reduce of the loss): {wrapper} averages already.",
    )


def explain_by_scale(passes: Passes, losses: Losses) -> list[Finding]:
    """Report a loss whose scale is wrong for averaged gradients (DDP303)."""
    is_complete = not losses.is_for_sums and not losses.is_partial(passes)
    scaled = (_judge_scaled_mean(passes, losses.ranks_per_model) or _judge_global_sum(passes)) if is_complete else []
    return scaled or _judge_counted_twice(passes, losses)


def _judge_scaled_mean(passes: Passes, ranks_per_model: int) -> list[Finding]:
    """Report a mean scaled by the number of ranks, replicas or ranks per model."""
    losses = [loss for by_rank in passes for loss in by_rank]
    kinds = {term.kind for loss in losses for term in loss.terms}
    if not kinds or not all(loss.scaled_at and loss.terms for loss in losses):
        return []
    kind = "mean" if "mean" in kinds else "sum"
    scales = {
        round(abs(total_factor(t)) * (loss.number + 1), 4) for loss in losses for t in loss.terms if t.kind == kind
    }
    counts = {loss.number + 1 for loss in losses}  # of micro-batches, which the divisor may be
    fitting = [
        (size, words)
        for size, words in sizes_of_groups(len(passes[0]), ranks_per_model).items()
        if (len(kinds) == 1 or all(size in (*t.divisors, *t.multipliers) for loss in losses for t in loss.terms))
        and (scales == {round(1.0 / size, 4)} or (scales == {float(size)} and kind == "mean"))  # a sum by chance
        and size not in counts
    ]
    if not fitting:
        return []
    size, words = fitting[0]
    verb, times = ("multiplied", f"{size} times") if max(scales) > 1 else ("divided", f"1/{size} of")
    return new_finding(
        "DDP303",
        ("loss",),
        f"The loss is a mean that is {verb} by {words}, and DDP averages its gradients over the ranks: they are "
        f"{times} those of the mean.",
        location=losses[0].scaled_at,
        evidence=[f"in all {len(passes)} backward passes that were compared, on every rank"],
        severity=Severity.WARNING,
        fix="Do not scale the loss: DDP averages gradients, which gives the gradient of the mean over all ranks.",
    )


def _judge_global_sum(passes: Passes) -> list[Finding]:
    """Report sums divided by a number summed over all ranks, though DDP divides again."""
    divisors = [divided_by(by_rank) for by_rank in passes]
    if not all(divisors):
        return []
    total, line, is_mixed = next(filter(None, divisors))
    part, effect = ("A term of the loss", "it has {} of its weight relative to the other terms")
    if not is_mixed:
        part, effect = "The loss", "gradients are {} of those of the mean"
    return new_finding(
        "DDP303",
        ("loss",),
        f"{part} of each rank is a sum, divided by a number that is summed over all ranks, and DDP averages over the "
        f"ranks again: {effect.format(f'1/{len(passes[0])}')}.",
        location=line,
        evidence=[f"in all {len(passes)} backward passes that were compared; in the first of them by {total:g}"],
        severity=Severity.WARNING,
        fix="Divide the number by dist.get_world_size(), or multiply the loss by it: DDP averages over the ranks.",
    )


def _judge_counted_twice(passes: Passes, losses: Losses) -> list[Finding]:
    """Report sums divided by a count that includes each element more than once.

    The ranks that compute one model together have equal elements, and a sum over these ranks counts each element again.
    If gradients are averaged, dividing by the global count is also wrong: DDP divides by the number of replicas again.
    """
    together, summed = losses.ranks_per_model, losses.is_for_sums
    steps = group_by(itertools.chain(*passes), lambda loss: loss.step)
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
    factors = [ratio * (1 if summed else models) for ratio in ratios]
    factor = round(factors[0]) if factors else 0
    sizes = {together} if summed else {together, models, together * models}
    if factor not in sizes - {1} or any(abs(exact / factor - 1) > SCALE_TOLERANCE for exact in factors):
        return []
    first = passes[0][0]
    note = "" if summed else ", and DDP averages over the replicas again"
    return new_finding(
        "DDP303",
        ("loss",),
        f"The loss is a sum, divided by {ratios[0]:.3g} times the number of its elements in all replicas{note}: "
        f"gradients are 1/{factor} of those of the mean.",
        location=first.scaled_at or first.computed_at or first.location,
        evidence=[
            f"in all {len(compared)} backward passes that were compared",
            f"{together} ranks compute one model together, and have the same elements",
        ],
        severity=Severity.WARNING,
        fix="Sum the number over the data dimension of the mesh only"
        + ("." if summed else ", and multiply the loss by the size of that, over which DDP averages."),
    )


def judge_gathered_loss(losses: Losses) -> list[Finding]:
    """Report a gather whose custom backward returns only the rank's part of gradients (DDP303)."""
    if not losses.local_parts or losses.are_rescaled or not losses.local_parts_lack_factor:
        return []
    return new_finding("DDP303", ("loss",), **describe_lost_factor(losses))


relocate = partial(locate_reduction, ("hook", "scale"))
