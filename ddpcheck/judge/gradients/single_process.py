"""DDP303, 305, 307 to 310, 312, 514: gradients that differ from the global batch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ddpcheck.findings.evidence.gradients import EXACT_FIT, LOOSEST_FIT, Difference, LossTerm, ShardAnalysis
from ddpcheck.findings.evidence.steps import Call, GradientState
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import capitalized, format_ranks, join_names, one_finding, unless_all
from ddpcheck.judge.gradients import loss_terms
from ddpcheck.judge.gradients.script_losses import LEAST_OF_GRADIENT
from ddpcheck.judge.judge_context import (
    SMALLEST_FACTOR,
    JudgeContext,
    SingleProcessFacts,
    first_explanation,
    worst_first,
)
from ddpcheck.judge.replicas.descriptions import judge_program_data, judge_programs


def judge_single_process(
    differences: Mapping[int, Sequence[Difference]], analysis: ShardAnalysis | None, known: JudgeContext
) -> list[Finding]:
    """Explain averaged gradients that differ from the global batch's, by pattern.

    Reports the first match of `EXPLANATIONS` (DDP216, 303, 304, 305, 309, 310, 312, 514 or 516), else DDP312.
    `differences` are by step; `analysis` is of the first mismatched step.
    """
    bad = {step: [item for item in items if item.bad] for step, items in differences.items()}
    bad = {step: items for step, items in bad.items() if items}
    if not bad:
        return []
    first = bad[min(bad)]
    count = f"{len(first)} of {len(differences[min(bad)])} gradients differ from the single process"
    facts = SingleProcessFacts(
        wrong=tuple(first),
        steps=unless_all(sorted(bad), len(differences)),
        tolerance=min(max(max(item.tolerance for item in first), 1e-6), LOOSEST_FIT),
        analysis=analysis or ShardAnalysis(error="they were not run"),
        known=known,
        evidence=(count, *map(str, worst_first(first)[:3])),
    )
    findings = first_explanation(EXPLANATIONS, facts) or loss_terms.judge_unexplained(facts)
    if max(item.error for items in bad.values() for item in items) >= LEAST_OF_GRADIENT:
        return findings
    severities = {"DDP305": Severity.WARNING}
    return [
        f if loss_terms.IS_SUM in f.tags else replace(f, severity=severities.get(f.code, f.severity)) for f in findings
    ]


def _explain_by_changed_gradients(facts: SingleProcessFacts) -> list[Finding]:
    """Report gradients changed in backward by value or by rank (DDP310).

    Runs first: a gradient that backward has changed fits no loss pattern, or a wrong one.
    """
    known = facts.known
    names = [item.name for item in facts.wrong]
    nonlinear = [name for name in known.nonlinear if name in names]
    differs_by_rank = facts.world_changed and known.hooks and all(call.differentiable for call in known.local.calls)
    if not nonlinear and not (differs_by_rank and _are_close(facts.analysis.shard_losses, known.local.losses)):
        return []
    location = next((hook.location for hook in known.hooks if hook.location), None)
    subjects = known.names.subjects(known.nonlinear if nonlinear else names)
    cause = capitalized(known.hooks[0].description) if known.hooks else "Something in backward"
    return facts.one_finding(
        "DDP310",
        f"{cause} changes the local gradient of {join_names(subjects)} before it is averaged, and the result is "
        f"{facts.largest_error:.2g} away from that of the global batch.",
        "a loss twice as large does not give gradients twice as large: backward is not linear"
        if nonlinear
        else "the losses are those of the same shards without a process group; only the gradients are not",
        *(f"on the path of gradients: {hook}" for hook in known.hooks[:3]),
        subjects=subjects,
        location=location or known.names.location(names),
    )


def _explain_by_micro_batches(facts: SingleProcessFacts) -> list[Finding]:
    """Report accumulation without dividing by the number of micro-batches (DDP514).

    Runs before other factors, because the counted backward passes match the factor.
    """
    expected, actual = facts.known.local.backwards
    ratio = facts.analysis.against_global.ratio
    if not facts.scaled or expected == actual or not math.isclose(ratio, actual / expected, rel_tol=1e-2):
        return []
    return facts.one_finding(
        "DDP514",
        "The loss accumulates gradients over micro-batches and does not divide by their number, which differs on a "
        f"rank: the gradient is {ratio:.4g} times the global batch's.",
        f"{expected} backward passes in the single process, {actual} on a rank",
        location=facts.known.loss_location,
    )


def _explain_by_statistics(facts: SingleProcessFacts) -> list[Finding]:
    """Report coupling if per-shard batch statistics explain the ranks' gradient (DDP304).

    Runs before causes that are only likely: if ranks also exchange tensors, running shards alone hides coupling.
    """
    fit, module = facts.analysis.by_statistics, facts.analysis.coupling.module_class
    is_exact = max(abs(fit.ratio - 1), fit.residual) <= max(facts.tolerance, EXACT_FIT)
    return loss_terms.judge_coupling(facts) if is_exact and module else []


def _explain_by_one_factor(facts: SingleProcessFacts) -> list[Finding]:
    """Report one factor on all gradients, of shards or global batch (DDP303, 305).

    If shards alone give different gradients or cannot be run, loss values show the source of the factor. Runs before
    differences between ranks, because the factor is equal on all ranks.
    """
    analysis, known, wrapper = facts.analysis, facts.known, facts.known.wrapper.named
    ratio = analysis.against_global.ratio
    if facts.world_changed and facts.is_factor(analysis.against_shards):
        return _factor_of_the_world(facts, analysis.against_shards.ratio)
    exchanges_tensors = any(call.elements > 1 for call in facts.suspect_calls)
    if not facts.scaled or exchanges_tensors or (facts.ran and not facts.world_changed):
        return []
    if _losses_are_scaled(analysis.shard_losses, known.local.losses, ratio):
        return _factor_of_the_world(facts, ratio)
    if known.local.losses and _are_close(known.local.losses, [analysis.global_loss] * len(known.local.losses)):
        return facts.one_finding(
            "DDP303",
            f"Every gradient is {known.factor(ratio)} times the global batch's: each rank computes the loss of the "
            f"whole batch, its gradient reaches the rank's own samples only, and {wrapper} averages.",
            f"every rank's loss is {analysis.global_loss:.4g}, that of the global batch",
            *(f"gathered by {call}" for call in known.local.calls[:2]),
            location=known.loss_location,
            fix=f"Multiply the loss by {known.count_of_replicas}, or gather with "
            "torch.distributed.nn.functional.all_gather, whose backward adds up the gradients of all ranks.",
        )
    weight = 1 / (known.world_size * ratio)
    return loss_terms.judge_normalisation(facts, [LossTerm(weights=(weight,) * known.world_size)])


def _explain_by_program(facts: SingleProcessFacts) -> list[Finding]:
    """Report ranks whose program values or losses differ (DDP216, 516).

    Runs before rank weights and collectives: an observed difference in values is the cause of both.
    """
    analysis, known = facts.analysis, facts.known
    if not facts.world_changed:
        return []
    if findings := judge_program_data(facts):
        return findings
    if known.local.calls or analysis.rank_weights.residual <= facts.tolerance:
        return []
    return judge_programs(facts)


def _explain_by_rank_weights(facts: SingleProcessFacts) -> list[Finding]:
    """Report shard gradients scaled by a rank-dependent factor (DDP303).

    Runs before collectives, because an exact fit of weights rules out another computation.
    """
    if not facts.world_changed or facts.analysis.rank_weights.residual > facts.tolerance:
        return []
    if all(term.rank_weights and term.error <= facts.tolerance for term in facts.analysis.terms):
        return []  # weights fit the global batch: another cause
    share = ", ".join(f"{weight:.4g}" for weight in facts.analysis.rank_weights.weights)
    return facts.one_finding(
        "DDP303",
        f"The ranks weigh their gradients by {share} and not by {1 / facts.known.world_size:.4g} each: the loss "
        "or the model applies a factor that depends on the rank.",
        fix="Take the factor that depends on the rank out of the loss and the model.",
    )


def _explain_by_collective_without_gradient(facts: SingleProcessFacts) -> list[Finding]:
    """Report a non-differentiable collective in forward that changes the gradients (DDP309).

    Runs after all patterns that fit exactly, because the collective is only a likely cause.
    """
    suspects = facts.suspect_calls
    if not suspects:
        return []
    if facts.known.local.choices:  # may explain the whole difference, such as random k-means initialization
        return loss_terms.judge_unexplained(facts)
    calls = list(dict.fromkeys(map(str, suspects)))
    ratio = facts.analysis.against_global.ratio
    first, one_over = suspects[0], facts.scaled and _is_one_over_world(facts, ratio)
    if one_over and first.elements > 1 and (first.operation == "all_reduce" or "gather" in first.operation):
        usage, fix = "whose result all ranks use in the same way", FIX_OF_SUM
        if first.operation != "all_reduce":
            usage = "and each rank computes the loss over the parts of all ranks, of which only its own has a gradient"
            fix = (
                "Use torch.distributed.nn.functional.all_gather, whose backward sums, and put no part back; or "
                f"multiply the loss by the world size; or {_IGNORE}"
            )
        return facts.one_finding(
            "DDP309",
            f"The forward pass calls {calls[0]}, {usage}: every gradient is {facts.known.factor(ratio)} times the "
            f"global batch's, since {facts.known.wrapper.named} averages gradients that should be summed.",
            subjects=(first.operation,),
            location=Location.parse(first.location),
            severity=Severity.WARNING,
            fix=fix,
        )
    return facts.one_finding(
        "DDP309",
        f"The forward pass calls {calls[0]}, through which no gradient flows, and the averaged gradients are "
        f"{facts.largest_error:.2g} away from those of the global batch.",
        *(f"called: {call}" for call in calls[1:]),
        subjects=tuple(dict.fromkeys(call.operation for call in suspects)),
        location=Location.parse(next((call.location for call in suspects if call.location), "")),
        fix=fix_without_gradient(suspects),
    )


_IGNORE = (
    "ignore DDP309 if the learning rate is set with this factor in mind, or the optimizer does not depend on it (LARS, "
    "Adam)."
)
FIX_OF_SUM = f"Use torch.distributed.nn.functional.all_reduce, whose backward sums; or {_IGNORE}"
"""Fix for a non-differentiable sum that all ranks use in the same way."""
_WITH_GRADIENT = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)


def fix_without_gradient(calls: Sequence[Call]) -> str:
    """Return advice on non-differentiable collectives, or '' if torch has no replacement."""
    names = dict.fromkeys(call.operation for call in calls)
    replacements = [next((op for op in _WITH_GRADIENT if name.startswith(op)), "") for name in names]
    if not all(replacements):
        return ""
    functions = join_names([f"torch.distributed.nn.functional.{name}" for name in dict.fromkeys(replacements)])
    advice = f"Use {functions} instead, through which gradients come back from all ranks."
    if any("gather" in name for name in names):
        advice += " The local tensor, put back among the gathered ones, gets only the gradient of this rank's loss."
    if any("reduce" in name for name in names):
        advice += " Reduce a number that is only logged on a detached copy."
    return advice


def _explain_by_factors_of_terms(facts: SingleProcessFacts) -> list[Finding]:
    """Report factors on some loss terms if ranks communicate (DDP303).

    Runs after non-differentiable collectives, which may leave any factor on a term.
    """
    analysis = facts.analysis
    scaled = [term for term in analysis.terms if abs(term.ratio - 1) > max(facts.tolerance, SMALLEST_FACTOR)]
    most = max((abs(term.ratio - 1) for term in scaled), default=0.0)
    if not facts.world_changed or not scaled or analysis.terms_residual > max(facts.tolerance, LOOSEST_FIT * most):
        return []
    messages = (
        f"the gradient of {loss_terms.format_term(term, analysis.terms)} is "
        f"{facts.known.factor(term.ratio)} times the global batch's"
        for term in scaled
    )
    message, *others = dict.fromkeys(messages)
    averages = f"{facts.known.wrapper.named} averages already"
    gathers = [call for call in facts.known.local.calls if call.differentiable and "gather" in call.operation]
    if gathers and all(_is_one_over_world(facts, term.ratio) for term in scaled):
        return facts.one_finding(
            "DDP303",
            f"{capitalized(message)}: the function that calls {gathers[0]} returns the rank's own part of the gradient "
            f"instead of the sum over ranks, or the term is divided by the world size, and {averages}.",
            *others,
            location=Location.parse(gathers[0].location) or scaled[0].location,
            fix="Add up the gradients of all ranks in the backward of that function, as "
            "torch.distributed.nn.functional.all_gather does; or take the world size out of the loss.",
        )
    return facts.one_finding(
        "DDP303",
        f"{capitalized(message)}: its divisor is counted over all ranks, or scaled by the world size, and {averages}.",
        *others,
        location=scaled[0].location or facts.known.loss_location,
    )


def _is_one_over_world(facts: SingleProcessFacts, ratio: float) -> bool:
    return abs(ratio * facts.known.world_size - 1) <= SMALLEST_FACTOR


def _factor_of_the_world(facts: SingleProcessFacts, ratio: float) -> list[Finding]:
    factor, wrapper = facts.known.factor(ratio), facts.known.wrapper.named
    locations = [term.location for term in facts.analysis.terms]
    return facts.one_finding(
        "DDP303",
        f"Every gradient is {factor} times that of the same shards without a process group: the model or the loss "
        f"scales by the world size, and {wrapper} averages already.",
        *dict.fromkeys(f"called in forward: {call}" for call in facts.known.local.calls[:3] if call.elements > 0),
        location=(locations[0] if len(locations) == 1 else None) or facts.known.loss_location,
        fix=f"Take the factor {ratio:.4g} out of the loss (a division or multiplication by the world size, or an "
        f"all-reduce of the loss): {wrapper} averages already.",
    )


def _are_close(values: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(values, expected, strict=False)
    return len(values) == len(expected) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def _losses_are_scaled(shard_losses: Sequence[float], rank_losses: Sequence[float], ratio: float) -> bool:
    """Check if `rank_losses` are closer to `ratio * shard_losses` than to `shard_losses`."""
    pairs = [(s, r) for s, r in zip(shard_losses, rank_losses, strict=False) if s * r > 0]
    if not pairs or ratio <= 0:
        return False
    mean_log = sum(math.log(r / s) for s, r in pairs) / len(pairs)
    return abs(mean_log - math.log(ratio)) < abs(mean_log)


EXPLANATIONS: tuple[Callable[[SingleProcessFacts], list[Finding]], ...] = (
    _explain_by_changed_gradients,
    _explain_by_micro_batches,
    _explain_by_statistics,
    _explain_by_one_factor,
    _explain_by_program,
    _explain_by_rank_weights,
    _explain_by_collective_without_gradient,
    _explain_by_factors_of_terms,
    loss_terms.explain_by_terms,
)
"""Explanations in order (reasons in their docstrings); the first with findings is reported."""


ALL_MISSING = "no gradient is there, of zeros either"


def judge_nothing_compared(norms: Mapping[int, float], states: Iterable[GradientState] = ()) -> list[Finding]:
    """Report that every gradient was zero or missing (DDP307)."""
    kinds = set(states)
    empty = sorted(step for step, norm in norms.items() if norm == 0.0)
    if not norms or len(empty) < len(norms):
        return []
    return one_finding(
        "DDP307",
        ("loss",),
        "Every gradient was zero or missing in every step, so nothing was compared.",
        evidence=["a comparison of zeros with zeros would pass whatever DDP did"],
        tags=(ALL_MISSING,) if kinds and kinds <= {"missing", "lost"} else (),
    )


def judge_repeat(differences: Mapping[int, Sequence[Difference]], step: int) -> list[Finding]:
    """Report a step that is not reproducible on a rank (DDP308); by rank."""
    bad = {rank: [item for item in items if item.bad] for rank, items in differences.items()}
    ranks = tuple(sorted(rank for rank, items in bad.items() if items))
    if not ranks:
        return []
    worst = max((item for items in bad.values() for item in items), key=lambda item: item.error)
    return one_finding(
        "DDP308",
        ("loss",),
        f"The same step run twice on {format_ranks(ranks)} gave different gradients, so comparisons mean nothing.",
        ranks=unless_all(ranks, len(differences)),
        steps=(step,),
        evidence=[str(worst), "the generators of torch, numpy and random had the same seed both times"],
    )
