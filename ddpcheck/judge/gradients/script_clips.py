"""DDP301, 303, 310: gradients changed before the optimizer step (clips, hooks, other code)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.evidence.loop import GradientsChanged, GradientsHooked, HookedGradient
from ddpcheck.findings.evidence.script import GradientsClipped, LossDifferentiated, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by_value, join_names, minority_ranks, one_finding, plural_verb, told_by_rank
from ddpcheck.judge.gradients.script_alone import (
    Steps,
    all_gradients_agree,
    are_close,
    are_scaled,
    differing,
    gradients_differ,
    minority_of,
    short,
    spelled,
)
from ddpcheck.judge.gradients.script_losses import SCALE_FREE
from ddpcheck.stream.entries import ReplicaCaptured

Clips = Sequence[Sequence[GradientsClipped]]  # by rank, in order
Used = Sequence[tuple[OptimizerStep, ReplicaCaptured]]
"""Optimizer steps on one rank, each with the state after the last reduction."""

_FEWEST_STEPS = 3
_EXACT = 64  # a sketch up to this size has every element, so the norm is exact
_TOLERANCE = 1e-3
_ALIKE = (
    "Clip, scale, mask and add noise in the same way on every rank; all_reduce the values first that depend on local "
    "data."
)


def judge_step_gradients(steps: Sequence[Steps], clips: Clips = ()) -> list[Finding]:
    """Report averaged gradients that differ between ranks at the optimizer step (DDP301)."""
    for by_rank in steps:
        if not all(step.averaged for step in by_rank) or len({step.reductions for step in by_rank}) > 1:
            continue
        unaveraged = {name for step in by_rank for name in step.unaveraged}
        names = [name for name in differing([step.norms for step in by_rank]) if name not in unaveraged]
        if names:
            values = {name: [step.norms.get(name) for step in by_rank] for name in names}
            ranks = minority_of([step.norms for step in by_rank], names)
            findings = one_finding(
                "DDP301",
                [short(name) for name in names],
                f"The averaged {plural_verb('gradient', 'gradients', names)} of "
                f"{join_names([short(name) for name in names])} {plural_verb('was', 'were', names)} changed after "
                "backward, differently on each rank.",
                ranks=ranks,
                steps=(by_rank[0].count,),
                location=by_rank[0].location,
                evidence=[
                    f"norm before the optimizer's step: {text}"
                    for text in told_by_rank({short(n): [spelled(v) for v in values[n]] for n in names[:3]})
                ],
                fix=_ALIKE,
            )
            return [_at_scale(finding, by_rank) or _at_cause(finding, by_rank, clips) for finding in findings]
    return []


def judge_scaled_by_hand(steps: Sequence[Steps], clips: Clips = ()) -> list[Finding]:
    """Report unwrapped gradients that differ only by a factor per rank (DDP301)."""
    for by_rank in steps:
        names = [name for name in by_rank[0].alone if gradients_differ(by_rank, name)]
        if len(names) < 2 or len(are_scaled(names, by_rank)) < len(names):
            continue
        sizes = [math.hypot(*step.gradients[names[0]]) for step in by_rank]
        findings = one_finding(
            "DDP301",
            [short(name) for name in names],
            f"The gradients of {join_names([short(name) for name in names])} are those of the other ranks times a "
            "factor: they were scaled after the ranks had averaged them, differently on each rank.",
            ranks=minority_ranks([round(size / max(sizes), 3) for size in sizes]) if len(sizes) > 2 else (),
            steps=(by_rank[0].count,),
            location=by_rank[0].location,
            evidence=[f"norm of {short(names[0])}: {_by_rank(sizes)}"],
            fix=_ALIKE,
        )
        return [_at_scale(finding, by_rank) or _at_cause(finding, by_rank, clips) for finding in findings]
    return []


def _at_scale(finding: Finding, steps: Steps) -> Finding | None:
    """Relocate a finding to the load of a GradScaler with rank-dependent scale."""
    scales = [step.scale for step in steps]
    if len(set(scales)) < 2:
        return None
    evidence = *finding.evidence, f"the scale of the GradScaler: {_by_rank(scales)}"
    fix = "Load the same state into the GradScaler on every rank, or on none; the same init_scale likewise."
    load_line = next((step.scale_at for step in steps if step.scale_at is not None), None)
    return replace(finding, evidence=evidence, fix=fix).relocated(load_line, "optimizer steps")


def _at_cause(finding: Finding, steps: Steps, clips: Clips) -> Finding:
    line = steps[0].changed_at or steps[0].reduced_at
    return _at_clip(finding, clips) or finding.relocated(line, "optimizer steps")


def _at_clip(finding: Finding, clips: Clips) -> Finding | None:
    """Relocate a finding to a clip that differs between ranks, or return `None`."""
    early = [(r, clip) for r, rank_clips in enumerate(clips) for clip in rank_clips if clip.step <= finding.steps[0]]
    if not all(clips) and (clipped := {rank: clip for rank, clip in early if clip.norm > clip.limit}):
        first = next(iter(clipped.values()))
        message, fix = f"{first.by} is called there, on no other rank", f"Call {first.by} on every rank, or on none."
        explained = replace(finding, ranks=tuple(clipped), evidence=(*finding.evidence, message), fix=fix)
        return explained.relocated(first.location, "optimizer steps")
    for by_rank in zip(*clips, strict=False):
        first = by_rank[0]
        is_paired = len({(clip.count, clip.step, clip.location, clip.by) for clip in by_rank}) == 1
        if is_paired and (difference := _clip_difference(by_rank)) is not None:
            message, fix = difference
            explained = replace(finding, evidence=(*finding.evidence, f"{first.by} {message}"), fix=fix)
            return explained.relocated(first.location, "optimizer steps")
    return None


def _clip_difference(clips: Sequence[GradientsClipped]) -> tuple[str, str] | None:
    """Return how one clip differs between ranks, and the fix, or `None`."""
    norms, limits = [clip.norm for clip in clips], [clip.limit for clip in clips]
    if clips[0].of_parts and not are_close(norms) and max(norms) > max(limits) > 0:
        return (
            f"computes a norm there of {_by_rank(norms)}; ranks have rank-local parameters",
            "Clip by a norm over all ranks: add up the squared norms of the rank-local parameters with an all_reduce, "
            "and those of the other parameters once.",
        )
    if are_close(norms) and not are_close(limits) and norms[0] > min(limits) > 0 and clips[0].location is not None:
        return (
            f"gets a different limit there: {_by_rank(limits)}",
            "Clip to the same limit on every rank: all_reduce the values that it is computed from before the call.",
        )
    return None


def _by_rank(values: Sequence[float]) -> str:
    return "; ".join(group_by_value([spelled(value) for value in values]))


def judge_clips(clips: Clips, steps: Sequence[Sequence[Steps]]) -> list[Finding]:
    """Report gradients clipped by each rank's own norm before the average (DDP310)."""
    matched = [
        by_rank for by_rank in zip(*clips, strict=False) if len({(clip.count, clip.location) for clip in by_rank}) == 1
    ]
    matched = [by_rank for by_rank in matched if not by_rank[0].of_parts]
    unequal = [by_rank for by_rank in matched if not are_close([clip.norm for clip in by_rank])]
    if any(len({(clip.step, clip.location) for clip in rank_clips}) < len(rank_clips) for rank_clips in clips):
        return []  # several clips per step, such as one per sample
    averaged = [by_rank for optimizer_steps in steps for by_rank in optimizer_steps if all_gradients_agree(by_rank)]
    if len(unequal) < 2 or 2 * len(unequal) <= len(matched) or not averaged or len(averaged) < sum(map(len, steps)):
        return []
    first = unequal[0]
    return one_finding(
        "DDP310",
        (first[0].by,),
        f"{first[0].by} sees different gradients on each rank: it clips gradients that are averaged later.",
        location=first[0].location,
        evidence=[f"rank {rank}: a norm of {clip.norm:.6g}" for rank, clip in enumerate(first[:4])],
        fix=f"Call {first[0].by} after the gradients have been averaged, and before the optimizer's step.",
    )


def judge_changed(changes: Sequence[Sequence[GradientsChanged]]) -> list[Finding]:
    """Report gradients that are clipped or changed between micro-batches (DDP310).

    Local gradients are changed by rank-dependent factors. Averaged gradients are changed equally, so only calls of
    known clip functions count.
    """
    matched = [
        by_rank
        for by_rank in zip(*changes, strict=False)
        if len({(change.wrapper, change.step, change.by, change.location) for change in by_rank}) == 1
    ]
    local = [by_rank for by_rank in matched if all(change.put_off for change in by_rank)]
    unequal = [by_rank for by_rank in local if not are_close([change.factor for change in by_rank])]
    clipped = [by_rank for by_rank in matched if by_rank[0].by and not any(change.put_off for change in by_rank)]
    shown = unequal if len(unequal) > 1 and 2 * len(unequal) > len(local) else clipped
    if len(shown) < 2:
        return []
    first = shown[0]
    cause = first[0].by or "The script"
    when = "by its own factor on each rank, before they are averaged" if shown is unequal else "before the step has all"
    return one_finding(
        "DDP310",
        (first[0].by or "gradients",),
        f"{cause} changes the gradients after each micro-batch, {when}; those of the next micro-batch are added to the "
        "changed ones.",
        location=first[0].location,
        evidence=[f"rank {r}: it multiplies their norm by {change.factor:.4g}" for r, change in enumerate(first[:4])],
        severity=Severity.ERROR if shown is unequal else Severity.WARNING,
        fix=f"Call {first[0].by or 'it'} once a step, after its last backward pass and before the optimizer's step.",
    )


def judge_hooked(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report hooks that change local gradients differently on each rank (DDP310).

    Limits on the size of elements always count, because clamping does not commute with the average. Factors of a
    weighted average and weights of batches are intended.
    """
    changes = [{hook.step: hook.changed for hook in rank_hooks} for rank_hooks in hooks]
    steps_by_kind: dict[str, dict[str, list[int]]] = {}  # by kind of change and parameter: steps
    for step in steps:
        by_rank = [by_step.get(step, {}) for by_step in changes]
        for name in dict.fromkeys(name for by_name in by_rank for name in by_name):
            if kind := _hook_difference([by_name.get(name, _AS_IT_WAS) for by_name in by_rank]):
                steps_by_kind.setdefault(kind, {}).setdefault(name, []).append(step)
    for kind in ("scaled", "masked", "limited"):
        names = [name for name, seen in steps_by_kind.get(kind, {}).items() if len(seen) >= _FEWEST_HOOKED]
        when = steps_by_kind[kind][names[0]] if names else []
        if names and not (kind == "scaled" and _are_weights(changes, names, when)):
            return _finding_of_hooks(hooks, [by_step.get(when[0], {}) for by_step in changes], names, kind, when)
    return _hooked_in_modules(hooks, steps)


def judge_scaled_by_hooks(
    hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int], parameters: Collection[str]
) -> list[Finding]:
    """Report hooks that scale all gradients by the world size or inverse (DDP303)."""
    size, wanted = len(hooks), set(steps)
    if len(steps) < _FEWEST_HOOKED or any(wanted - {hook.step for hook in rank_hooks} for rank_hooks in hooks):
        return []
    passes = [hook.changed for rank_hooks in hooks for hook in rank_hooks if hook.step in wanted]
    known = [change for changed in passes for change in changed.values() if change.kind]  # others are too small
    if not known or not parameters or not all(changed.keys() >= set(parameters) for changed in passes):
        return []
    for factor, words in ((size, f"{size} (the world size)"), (1 / size, f"1/{size} (one over the world size)")):
        if all(change.kind == "scaled" and math.isclose(change.number, factor, rel_tol=_TOLERANCE) for change in known):
            return one_finding(
                "DDP303",
                sorted(parameters),
                f"A hook multiplies the gradients of each rank by {words}, and DDP averages over the ranks: the "
                f"optimizer uses {factor:.4g} times the gradient of the mean.",
                location=next((hook.location for rank_hooks in hooks for hook in rank_hooks if hook.location), None),
                evidence=[f"in all {len(steps)} steps that were compared, on every rank"],
                fix="Remove the hook: DDP already averages the gradients.",
            )
    return []


def _hooked_in_modules(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report module backward hooks that scale by a constant factor per rank (DDP310).

    A factor that changes between steps may depend on the samples, as in a single process.
    """
    rank_factors = [{hook.step: hook.factors for hook in rank_hooks if hook.step in steps} for rank_hooks in hooks]
    for name in dict.fromkeys(name for by_step in rank_factors for factors in by_step.values() for name in factors):
        when = sorted({step for by_step in rank_factors for step, factors in by_step.items() if name in factors})
        by_rank = [[by_step.get(step, {}).get(name, 1.0) for step in when] for by_step in rank_factors]
        if len(when) >= _FEWEST_HOOKED and not any(map(_factors_differ, by_rank)):
            changes = [HookedGradient("scaled", factors[0]) for factors in by_rank]
            if _hook_difference(changes):
                return _finding_of_hooks(hooks, [{name: change} for change in changes], [name], "scaled", when)
    return []


_Hooked = Mapping[int, Mapping[str, HookedGradient]]
"""Gradient changes by hooks on one rank, by step and parameter name."""
_AS_IT_WAS = HookedGradient("scaled", 1.0)
_FEWEST_HOOKED = 2  # steps


def _hook_difference(changes: Sequence[HookedGradient]) -> str:
    """Return how hooks change a gradient differently between ranks, or '' if unknown."""
    kinds = {change.kind for change in changes}
    if "limited" in kinds:
        return "limited"
    if "" in kinds:
        return ""
    if len(kinds) > 1 or len({change.zeros for change in changes}) > 1:
        return "masked"
    factors = [change.number for change in changes]
    average = sum(factors) / len(factors)
    return "scaled" if _factors_differ(factors) and abs(average - 1.0) > _FACTORS_APART else ""


def _are_weights(hooks: Sequence[_Hooked], names: Sequence[str], steps: Sequence[int]) -> bool:
    """Check if each rank scales all gradients by one changing factor: batch weights.

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


_FACTORS_APART = 0.01


def _factors_differ(factors: Sequence[float]) -> bool:
    return max(factors) - min(factors) > _FACTORS_APART * max(map(abs, factors))


def _finding_of_hooks(
    hooks: Sequence[Sequence[GradientsHooked]],
    first: Sequence[Mapping[str, HookedGradient]],
    names: Sequence[str],
    kind: str,
    steps: Sequence[int],
) -> list[Finding]:
    changes = [by_name.get(names[0], _AS_IT_WAS) for by_name in first]
    action = {
        "scaled": "multiplies each rank's own gradient by a different factor",
        "masked": "sets different elements of the gradient to zero on each rank",
        "limited": "limits the elements of each rank's own gradient",
    }[kind]
    number = {"scaled": "times {0:.4g}", "masked": "a different mask", "limited": "cut off at {0:.4g}"}[kind]
    texts = ["no element is changed" if change == _AS_IT_WAS else number.format(change.number) for change in changes]
    return one_finding(
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


def judge_rescaled(used: Sequence[Used], losses: Sequence[Sequence[LossDifferentiated]], size: int) -> list[Finding]:
    """Report averaged gradients scaled by the world size or its inverse (DDP303).

    Needs a measured factor and a line that scales by the world size, because a factor such as 1/2 may be intended.
    Losses that are also scaled by the world size, and optimizers invariant to gradient scale, are left out.
    """
    all_losses = [loss for rank_losses in losses for loss in rank_losses]
    if size < 2 or not all(used) or not all_losses or any(loss.scaled for loss in all_losses):
        return []
    first = used[0][0][0]
    if first.rescaled_at is None or first.options.get("class", "").startswith(SCALE_FREE):
        return []
    factors = [_factor_of(step, captured) for rank_steps in used for step, captured in rank_steps]
    known = [factor for factor in factors if factor is not None]
    if len(known) < _FEWEST_STEPS * len(used) or not math.isclose(abs(math.log(known[0], size)), 1, rel_tol=_TOLERANCE):
        return []
    if not all(math.isclose(factor, known[0], rel_tol=_TOLERANCE) for factor in known):
        return []
    divided = known[0] < 1
    return one_finding(
        "DDP303",
        ("gradients",),
        f"The gradients that DDP has averaged are {'divided' if divided else 'multiplied'} by the number of ranks "
        f"before the optimizer uses them, which are {f'1/{size} of' if divided else f'{size} times'} the average then.",
        location=first.rescaled_at,
        evidence=[
            f"in all {len(known) // len(used)} steps that were compared, on every rank: a norm of {known[0]:.6g} times "
            "that of the average",
        ],
        related={"optimizer steps": first.location},
        severity=Severity.WARNING,
        fix="Leave out the factor of dist.get_world_size(): DDP has divided the sum of the gradients by it.",
    )


def _factor_of(step: OptimizerStep, captured: ReplicaCaptured) -> float | None:
    """Return the constant factor from reduced to used gradients, or None.

    Only small gradients count, because their sketches have exact norms.
    """
    factors = [factor for factor in _factors(step, captured) if factor > 0]
    is_constant = bool(factors) and max(factors) - min(factors) <= _TOLERANCE * max(factors)
    return sum(factors) / len(factors) if is_constant else None


def _factors(step: OptimizerStep, captured: ReplicaCaptured) -> Iterator[float]:
    for name, numbers in captured.averaged.items():
        if 0 < len(numbers) <= _EXACT and (norm := math.hypot(*numbers)) > LEAST:
            yield step.norms.get(f"{captured.wrapper}/{name}", 0.0) / norm
