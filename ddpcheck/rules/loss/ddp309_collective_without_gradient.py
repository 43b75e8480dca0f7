"""DDP309 collective-without-gradient: error, gradients_differ, keeps_results

A collective that autograd does not differentiate is on the path from parameters to the loss.

Why: torch.distributed.all_reduce and all_gather are not differentiable. For backward, values from other ranks are
    constants. So the gradient lacks the contribution of these values, or stops at the collective. (PyTorch docs,
    torch.distributed: autograd through collectives is in torch.distributed.nn.functional.)
Fix: Use torch.distributed.nn.functional.all_reduce or all_gather, which autograd differentiates; if a value is only
    logged, reduce a detached copy of it.
Detected: ddpcheck records the collectives of the forward pass. DDP309 is reported if autograd does not differentiate
    a collective between parameters and the loss. The gradient must also differ from the global batch's. `ddpcheck
    run` reports a loss that was all-reduced in place and then differentiated. It also reports a loss that uses all
    gathered rows, including the rank's own, as constants. It is only a warning if the rank's own rows are replaced by
    features with a gradient. Then only the gradient from the other ranks' losses is lost, or, if every rank computes
    the same loss, the gradient is too small by a factor of the world size.
Ignore: If the values from other ranks should be constants, as negatives of a contrastive loss often are.
Line: The call of the collective. If a function of the script gathers, its backward.
Checks: report parity; run loss, loop; repro single-process
Explains: DDP303; DDP101 DDP102 if same subjects
Reports: mlfoundations/open_clip#616 KevinMusgrave/pytorch-metric-learning#10
Example:
    dist.all_gather(parts, features)         # parts carry no gradient
    everything = torch.cat(parts)            # right: torch.cat(torch.distributed.nn.functional.all_gather(features))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddpcheck.findings.evidence.loop import OwnRowsReinserted
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import join_names, new_finding, plural, plural_verb
from ddpcheck.rules.loss.ddp312_unexplained_difference import judge_unexplained
from ddpcheck.rules.registry import rule
from ddpcheck.trace.check_context import SingleProcessFacts, is_inverse_world_size
from ddpcheck.trace.loop import Loop
from ddpcheck.trace.losses import MIN_GATHERS, Losses
from ddpcheck.trace.unwrapped_params import param_name


def judge_gathers(losses: Losses) -> list[Finding]:
    """Report gathered features that a loss treats as constants; at most one finding.

    Requires these features in `MIN_GATHERS` steps on all ranks, or in one step if parameters get no gradient.
    """
    uses = losses.constants
    steps = [{use.step for use in rank_uses} for rank_uses in uses]
    common = set.intersection(*steps) if len(uses) > 1 else set()
    if not common:
        return []
    first = uses[0][0]
    if names := [*map(param_name, first.names)]:
        return new_finding(
            "DDP309",
            names,
            f"{join_names(names)} {plural_verb('reaches', 'reach', names)} the loss only through the result of "
            f"{first.operation}, which carries no gradient: {plural_verb('it gets', 'they get', names)} none.",
            location=first.location,
            evidence=["its input carries a gradient, and its result is in the loss and carries none"],
            fix="Use torch.distributed.nn.functional.all_gather, which autograd differentiates.",
        )
    if len(common) < MIN_GATHERS:
        return []
    return new_finding(
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


def judge_local_parts(losses: Losses) -> list[Finding]:
    """Report gathered features that get the gradient of their rank's loss only (DDP309).

    If the same gradient arrives on every rank, each rank has the loss of all rows: the ranks' parts sum to the
    gradient, and DDP divides the sum by the world size. If gradients differ, gradients of other ranks' losses are lost.
    """
    if not losses.local_parts:
        return []
    first = losses.local_parts[0][0]
    if losses.gathered_gradients_differ:
        return new_finding(
            "DDP309",
            (first.operation,),
            f"The loss of each rank depends on the features of all ranks, gathered by {first.operation}, and its "
            "gradient reaches the rank's own features only: the gradient from the losses of other ranks is lost.",
            location=first.location,
            evidence=[f"the gradient of the gathered rows differs between ranks, {_step_text(losses)}"],
            severity=Severity.WARNING,
            fix=_fix_of_gather(first),
        )
    if first.by_function or not losses.local_parts_lack_factor:
        return []
    return new_finding("DDP309", (first.operation,), **describe_lost_factor(losses))


def describe_lost_factor(losses: Losses) -> dict[str, Any]:
    """Return `new_finding` arguments for a gathered loss whose gradients lack a factor (world size)."""
    first, size, is_mixed = losses.local_parts[0][0], len(losses.parts), losses.uses_features_directly
    phrase = "its part of the gradients is" if is_mixed else "gradients are"
    mixed_note = "other terms of the loss use the features directly, and have their whole gradient" if is_mixed else ""
    return {
        "message": f"Each rank computes the loss of the rows of all ranks, gathered by {first.operation}, but the "
        "gradient of this loss reaches the rank's own features only. DDP averages over the ranks: "
        f"{phrase} 1/{size} of what the loss asks for.",
        "location": first.location,
        "evidence": [f"the gradient of the gathered rows is the same on every rank, {_step_text(losses)}", mixed_note],
        "severity": Severity.WARNING,
        "fix": f"Multiply {'these terms' if is_mixed else 'the loss'} by the world size. Or: {_fix_of_gather(first)}",
    }


def _step_text(losses: Losses) -> str:
    return f"in {plural(len(losses.local_parts), 'compared step')}"


def _fix_of_gather(part: OwnRowsReinserted) -> str:
    advice = "Gather with torch.distributed.nn.functional.all_gather, whose backward adds up the gradients of all ranks"
    if part.by_function:
        return f"{advice}; or do so in the backward of the script's own function."
    return f"{advice}, and put no part back."


def explain_by_collective_without_gradient(facts: SingleProcessFacts) -> list[Finding]:
    """Report a non-differentiable collective in forward that changes the gradients (DDP309).

    Runs after all patterns that fit exactly, because the collective is only a likely cause.
    """
    suspects = facts.suspect_calls
    if not suspects:
        return []
    if facts.known.local.choices:  # may explain the whole difference, such as random k-means initialization
        return judge_unexplained(facts)
    calls = list(dict.fromkeys(map(str, suspects)))
    ratio = facts.analysis.against_global.ratio
    first, one_over = suspects[0], facts.scaled and is_inverse_world_size(facts, ratio)
    if one_over and first.elements > 1 and (first.operation == "all_reduce" or "gather" in first.operation):
        usage, fix = "whose result all ranks use in the same way", FIX_OF_SUM
        if first.operation != "all_reduce":
            usage = "and each rank computes the loss over the parts of all ranks, of which only its own has a gradient"
            fix = (
                "Use torch.distributed.nn.functional.all_gather, whose backward sums, and put no part back; or "
                f"multiply the loss by the world size; or {_IGNORE_ADVICE}"
            )
        return facts.new_finding(
            "DDP309",
            f"The forward pass calls {calls[0]}, {usage}: every gradient is {facts.known.factor(ratio)} times the "
            f"global batch's, since {facts.known.wrapper.named} averages gradients that should be summed.",
            subjects=(first.operation,),
            location=Location.parse(first.location),
            severity=Severity.WARNING,
            fix=fix,
        )
    return facts.new_finding(
        "DDP309",
        f"The forward pass calls {calls[0]}, through which no gradient flows, and the averaged gradients are "
        f"{facts.largest_error:.2g} away from those of the global batch.",
        *(f"called: {call}" for call in calls[1:]),
        subjects=tuple(dict.fromkeys(call.operation for call in suspects)),
        location=Location.parse(next((call.location for call in suspects if call.location), "")),
        fix=fix_without_gradient(suspects),
    )


_IGNORE_ADVICE = (
    "ignore DDP309 if the learning rate is set with this factor in mind, or the optimizer does not depend on it (LARS, "
    "Adam)."
)

FIX_OF_SUM = f"Use torch.distributed.nn.functional.all_reduce, whose backward sums; or {_IGNORE_ADVICE}"
"""Fix for a non-differentiable sum that all ranks use in the same way."""

_DIFFERENTIABLE_CALLS = (
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
    replacements = [next((op for op in _DIFFERENTIABLE_CALLS if name.startswith(op)), "") for name in names]
    if not all(replacements):
        return ""
    functions = join_names([f"torch.distributed.nn.functional.{name}" for name in dict.fromkeys(replacements)])
    advice = f"Use {functions} instead, through which gradients come back from all ranks."
    if any("gather" in name for name in names):
        advice += " The local tensor, put back among the gathered ones, gets only the gradient of this rank's loss."
    if any("reduce" in name for name in names):
        advice += " Reduce a number that is only logged on a detached copy."
    return advice


@rule
def judge_reduced_in_place(loop: Loop) -> list[Finding]:
    """DDP309: backward through a tensor that a collective has overwritten.

    A single number, such as a logged loss, is reported only if divided by the world size, and not if the script
    accumulates gradients: then the divisor may be the number of micro-batches. If a sum gets equal gradients on all
    ranks (Barlow Twins loss), only a factor is wrong. If an average gets equal gradients, nothing is wrong.
    """
    for index, use in ((index, use) for uses in loop.reduced_in_place for index, use in enumerate(uses)):
        scaled = use.factor is not None and math.isclose(use.factor * loop.world_size, 1.0, rel_tol=1e-5)
        if use.elements == 1 and (not scaled or loop.accumulates):
            continue
        gradients = {uses[index].gradient if len(uses) > index else 0 for uses in loop.reduced_in_place}
        are_equal = bool(use.gradient) and gradients == {use.gradient}
        severity, evidence, fix = None, [f"{use.elements} elements"], ""
        message = f"Backward passes through a tensor that {use.operation} has overwritten"
        if scaled:
            message = (
                f"The loss is reduced by {use.operation} and divided by the world size before backward: autograd sees "
                "the division only, and DDP averages again."
            )
            evidence = [f"the gradient of the reduced loss is {use.factor:.6g}"]
            fix = "Reduce a detached copy: logged = loss.detach().clone(); dist.all_reduce(logged)."
        elif are_equal and use.is_average:
            continue
        elif are_equal:
            severity = Severity.WARNING
            message += (
                ", and all ranks compute the same from it: DDP averages gradients that should be summed, so they are "
                f"1/{loop.world_size} of the global batch's."
            )
            fix = FIX_OF_SUM
        else:
            message += ": values from the other ranks are constants for autograd."
        return new_finding(
            "DDP309", (use.operation,), message, location=use.location, evidence=evidence, fix=fix, severity=severity
        )
    return []
