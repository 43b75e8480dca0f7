"""DDP310 gradient-changed-before-reduction: error, gradients_differ

A hook, a clip or an optimizer step reads or changes local gradients before they are averaged.

Why: Gradient hooks run before DDP averages. A clip in such a hook clips each rank by its own norm. An optimizer step
    during backward uses the local gradient. The result differs from that of the global batch, and ranks may diverge.
    (PyTorch docs, DistributedDataParallel and register_comm_hook.)
Fix: Clip, scale and step after backward has returned; to act inside the reduction, use register_comm_hook.
Detected: ddpcheck repeats a step with a loss twice as large. DDP310 is reported if the gradients are not twice as
    large. If there are hooks, ddpcheck also compares each rank with a single process on the same samples. DDP310 is
    reported if the losses are equal, but the gradients are not. `ddpcheck run` reports clip_grad_norm_ if the
    gradients are averaged only after the call. It reports hooks whose factor or mask differs between ranks. A
    backward hook of a module that scales gradients is reported only if each rank has its own factor, the same in each
    step. Hooks that clamp the elements of a gradient are reported as a warning, even with the same limit on every
    rank. A hook that steps the optimizer during backward is reported if parameters then differ between ranks.
Ignore: If each rank should clip its own gradients, as some private or robust training does.
Line: The line that defines the hook, calls the clip, or calls the optimizer's step inside backward. If no hook is
    known: the line that creates the first parameter.
Checks: report parity; run reducer, optimizers; repro single-process
Explains: DDP302 if same subjects
Example:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1, 1))   # right: clip_grad_norm_(model.parameters(), 1.0) after backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.loop import GradientsHooked, HookedGradient, ModuleChanged
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import capitalized, group_by_value, join_names, make_finding, new_finding, plural
from ddpcheck.rules.registry import rule
from ddpcheck.trace.check_context import SingleProcessFacts, values_are_close
from ddpcheck.trace.gradients import MIN_HOOKED_STEPS, ReducerFacts
from ddpcheck.trace.loop import GradientChanges

_HookedGradients = Mapping[int, Mapping[str, HookedGradient]]
"""Changes that hooks made to gradients on one rank, by step and parameter name."""

FACTOR_TOLERANCE = 0.01
"""Relative difference above which two factors are different: smaller ones are rounding errors."""

UNCHANGED = HookedGradient("scaled", 1.0)


def explain_by_wrap_hooks(facts: ReducerFacts) -> list[Finding]:
    """Report a hook registered while wrapping that changes gradients (DDP310).

    Only under DDP, because custom wrappers reduce gradients by such hooks.
    """
    hooks, known = facts.known.wrap_hooks, facts.known
    if not facts.mismatched or not hooks or not known.wrapper.is_ddp:
        return []
    names = list(facts.mismatched)
    return facts.mismatch(
        "DDP310",
        f"{capitalized(hooks[0].description)}, registered while wrapping, changes gradients: under the wrapper, those "
        f"of {plural(len(names), 'parameter')} are not the average of the ranks' own.",
        *(f"on the path of gradients: {hook}" for hook in hooks[:3]),
        location=hooks[0].location or known.names.location(names),
    )


@rule
def judge_clips(changes: GradientChanges) -> list[Finding]:
    """Report gradients clipped by each rank's own norm before the average (DDP310)."""
    first = next(iter(changes.local_clips), None)
    if first is None:
        return []
    return new_finding(
        "DDP310",
        (first[0].by,),
        f"{first[0].by} sees different gradients on each rank: it clips gradients that are averaged later.",
        location=first[0].location,
        evidence=[f"rank {rank}: a norm of {clip.norm:.6g}" for rank, clip in enumerate(first[:4])],
        fix=f"Call {first[0].by} after the gradients have been averaged, and before the optimizer's step.",
    )


@rule
def judge_partial_changes(changes: GradientChanges) -> list[Finding]:
    """Report gradients that are clipped or changed between micro-batches (DDP310)."""
    if changes.local_clips or not changes.changes_while_accumulating:
        return []
    first = changes.changes_while_accumulating[0]
    is_local, by = first[0].is_unreduced, first[0].by
    when = "by its own factor on each rank, before they are averaged" if is_local else "before the step has all"
    return new_finding(
        "DDP310",
        (by or "gradients",),
        f"{by or 'The script'} changes the gradients after each micro-batch, {when}; those of the next micro-batch are "
        "added to the changed ones.",
        location=first[0].location,
        evidence=[f"rank {r}: it multiplies their norm by {change.factor:.4g}" for r, change in enumerate(first[:4])],
        severity=Severity.ERROR if is_local else Severity.WARNING,
        fix=f"Call {by or 'it'} once a step, after its last backward pass and before the optimizer's step.",
    )


_HOOK_KINDS = {  # by kind of change: what the hook does, and one rank's change
    "scaled": ("multiplies each rank's own gradient by a different factor", "times {0:.4g}"),
    "masked": ("sets different elements of the gradient to zero on each rank", "a different mask"),
    "limited": ("limits the elements of each rank's own gradient", "cut off at {0:.4g}"),
}


def _hook_finding(
    hooks: Sequence[Sequence[GradientsHooked]],
    first: Sequence[Mapping[str, HookedGradient]],
    names: Sequence[str],
    kind: str,
    steps: Sequence[int],
) -> list[Finding]:
    changes = [by_name.get(names[0], UNCHANGED) for by_name in first]
    action, number = _HOOK_KINDS[kind]
    texts = ["no element is changed" if change == UNCHANGED else number.format(change.number) for change in changes]
    return new_finding(
        "DDP310",
        names,
        f"A hook {action} before the gradients are averaged: the average differs from the result of the hook on the "
        "gradient of the global batch.",
        steps=steps[:1],
        location=next((hook.location for entries in hooks for hook in entries if hook.location is not None), None),
        evidence=[f"{names[0]}: {'; '.join(group_by_value(texts))}", f"so in {len(steps)} steps that were compared"],
        severity=Severity.WARNING if kind == "limited" else Severity.ERROR,
        fix="Change the gradients after backward has returned, when they are averaged; or by the same mask and factor "
        "on every rank.",
    )


def explain_by_changed_gradients(facts: SingleProcessFacts) -> list[Finding]:
    """Report gradients that backward changes nonlinearly, or differently on each rank (DDP310).

    Runs first: a changed gradient fits none of the explanations by the loss, or fits a wrong explanation.
    """
    known = facts.known
    names = [item.name for item in facts.wrong]
    nonlinear = [name for name in known.nonlinear if name in names]
    differs_by_rank = facts.world_changed and known.hooks and all(call.differentiable for call in known.local.calls)
    if not nonlinear and not (differs_by_rank and values_are_close(facts.analysis.shard_losses, known.local.losses)):
        return []
    location = next((hook.location for hook in known.hooks if hook.location), None)
    subjects = known.names.subjects(known.nonlinear if nonlinear else names)
    cause = capitalized(known.hooks[0].description) if known.hooks else "Something in backward"
    return facts.new_finding(
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


def locate_step_in_backward(finding: Finding, step: ModuleChanged) -> Finding:
    return make_finding(
        "DDP310",
        finding.subjects,
        f"A hook calls {step.how} while backward runs, before DDP has averaged the gradients: every rank steps with "
        "its own.",
        steps=finding.steps,
        location=step.location,
        related={"noticed": finding.location},
        evidence=finding.evidence,
        fix="Step after backward has returned, when the gradients are averaged; or have the hook leave the step to a "
        "communication hook of DDP, after its all_reduce.",
    )


def judge_hooked(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report hooks that change local gradients differently on each rank (DDP310).

    Hooks that clamp elements are always reported, because clamping does not commute with the average. Factors with a
    mean of 1 over the ranks (a weighted average) and factors that weight batches count as intended.
    """
    changes = [{hook.step: hook.changed for hook in rank_hooks} for rank_hooks in hooks]
    steps_by_kind: dict[str, dict[str, list[int]]] = {}  # by kind of change and parameter: steps
    for step in steps:
        by_rank = [by_step.get(step, {}) for by_step in changes]
        for name in dict.fromkeys(name for by_name in by_rank for name in by_name):
            if kind := _hook_difference([by_name.get(name, UNCHANGED) for by_name in by_rank]):
                steps_by_kind.setdefault(kind, {}).setdefault(name, []).append(step)
    for kind in _HOOK_KINDS:
        names = [name for name, seen in steps_by_kind.get(kind, {}).items() if len(seen) >= MIN_HOOKED_STEPS]
        numbers = steps_by_kind[kind][names[0]] if names else []
        if names and not (kind == "scaled" and _are_batch_weights(changes, names, numbers)):
            return _hook_finding(hooks, [by_step.get(numbers[0], {}) for by_step in changes], names, kind, numbers)
    return _judge_module_hooks(hooks, steps)


def _judge_module_hooks(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report module backward hooks that scale by a constant that differs between ranks (DDP310).

    A factor that changes between steps may depend on the samples, as in a single process.
    """
    rank_factors = [{hook.step: hook.factors for hook in rank_hooks if hook.step in steps} for rank_hooks in hooks]
    for name in dict.fromkeys(name for by_step in rank_factors for factors in by_step.values() for name in factors):
        hook_steps = sorted({step for by_step in rank_factors for step, factors in by_step.items() if name in factors})
        by_rank = [[by_step.get(step, {}).get(name, 1.0) for step in hook_steps] for by_step in rank_factors]
        if len(hook_steps) >= MIN_HOOKED_STEPS and not any(map(_factors_differ, by_rank)):
            changes = [HookedGradient("scaled", factors[0]) for factors in by_rank]
            if _hook_difference(changes):
                return _hook_finding(hooks, [{name: change} for change in changes], [name], "scaled", hook_steps)
    return []


def _hook_difference(changes: Sequence[HookedGradient]) -> str:
    """Return how hooks invalidate a gradient's average: "limited" (clamped), "masked", "scaled" or ""."""
    kinds = {change.kind for change in changes}
    if "limited" in kinds:
        return "limited"
    if "" in kinds:
        return ""
    if len(kinds) > 1 or len({change.zeros for change in changes}) > 1:
        return "masked"
    factors = [change.number for change in changes]
    average = sum(factors) / len(factors)
    return "scaled" if _factors_differ(factors) and abs(average - 1.0) > FACTOR_TOLERANCE else ""


def _are_batch_weights(hooks: Sequence[_HookedGradients], names: Sequence[str], steps: Sequence[int]) -> bool:
    """Return True if hooks weight batches: one factor for all gradients, changing between steps.

    The script may divide by the sum of weights after the average. A factor on one gradient may have another purpose.
    """
    weights: list[list[float]] = []
    for step in steps:
        by_rank = [
            [hook.number for name, hook in by_step.get(step, {}).items() if name in names] or [1.0] for by_step in hooks
        ]
        if any(map(_factors_differ, by_rank)):
            return False
        weights.append([factors[0] for factors in by_rank])
    return len(names) > 1 and any(map(_factors_differ, zip(*weights, strict=True)))


def _factors_differ(factors: Sequence[float]) -> bool:
    return max(factors) - min(factors) > FACTOR_TOLERANCE * max(map(abs, factors))
