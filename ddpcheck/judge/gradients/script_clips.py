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
    for of_ranks in steps:
        if not all(one.averaged for one in of_ranks) or len({one.reductions for one in of_ranks}) > 1:
            continue
        alone = {name for one in of_ranks for name in one.unaveraged}
        names = [name for name in differing([one.norms for one in of_ranks]) if name not in alone]
        if names:
            values = {name: [one.norms.get(name) for one in of_ranks] for name in names}
            ranks = minority_of([one.norms for one in of_ranks], names)
            found = one_finding(
                "DDP301",
                [short(name) for name in names],
                f"The averaged {plural_verb('gradient', 'gradients', names)} of "
                f"{join_names([short(name) for name in names])} {plural_verb('was', 'were', names)} changed after "
                "backward, differently on each rank.",
                ranks=ranks,
                steps=(of_ranks[0].count,),
                location=of_ranks[0].location,
                evidence=[
                    f"norm before the optimizer's step: {told}"
                    for told in told_by_rank({short(n): [spelled(v) for v in values[n]] for n in names[:3]})
                ],
                fix=_ALIKE,
            )
            return [_at_scale(one, of_ranks) or _at_cause(one, of_ranks, clips) for one in found]
    return []


def judge_scaled_by_hand(steps: Sequence[Steps], clips: Clips = ()) -> list[Finding]:
    """Report unwrapped gradients that differ only by a factor per rank (DDP301)."""
    for of_ranks in steps:
        names = [name for name in of_ranks[0].alone if gradients_differ(of_ranks, name)]
        if len(names) < 2 or len(are_scaled(names, of_ranks)) < len(names):
            continue
        sizes = [math.hypot(*one.gradients[names[0]]) for one in of_ranks]
        found = one_finding(
            "DDP301",
            [short(name) for name in names],
            f"The gradients of {join_names([short(name) for name in names])} are those of the other ranks times a "
            "factor: they were scaled after the ranks had averaged them, differently on each rank.",
            ranks=minority_ranks([round(size / max(sizes), 3) for size in sizes]) if len(sizes) > 2 else (),
            steps=(of_ranks[0].count,),
            location=of_ranks[0].location,
            evidence=[f"norm of {short(names[0])}: {_by_rank(sizes)}"],
            fix=_ALIKE,
        )
        return [_at_scale(one, of_ranks) or _at_cause(one, of_ranks, clips) for one in found]
    return []


def _at_scale(finding: Finding, of_ranks: Steps) -> Finding | None:
    """Relocate a finding to the load of a GradScaler with rank-dependent scale."""
    scales = [one.scale for one in of_ranks]
    if len(set(scales)) < 2:
        return None
    evidence = *finding.evidence, f"the scale of the GradScaler: {_by_rank(scales)}"
    fix = "Load the same state into the GradScaler on every rank, or on none; the same init_scale likewise."
    loaded = next((one.scale_at for one in of_ranks if one.scale_at is not None), None)
    return replace(finding, evidence=evidence, fix=fix).relocated(loaded, "optimizer steps")


def _at_cause(finding: Finding, of_ranks: Steps, clips: Clips) -> Finding:
    line = of_ranks[0].changed_at or of_ranks[0].reduced_at
    return _at_clip(finding, clips) or finding.relocated(line, "optimizer steps")


def _at_clip(finding: Finding, clips: Clips) -> Finding | None:
    """Relocate a finding to a clip that differs between ranks, or return `None`."""
    early = [(r, one) for r, of_rank in enumerate(clips) for one in of_rank if one.step <= finding.steps[0]]
    if not all(clips) and (on := {rank: one for rank, one in early if one.norm > one.limit}):
        first = next(iter(on.values()))
        told, fix = f"{first.by} is called there, on no other rank", f"Call {first.by} on every rank, or on none."
        explained = replace(finding, ranks=tuple(on), evidence=(*finding.evidence, told), fix=fix)
        return explained.relocated(first.location, "optimizer steps")
    for of_ranks in zip(*clips, strict=False):
        first = of_ranks[0]
        paired = len({(one.count, one.step, one.location, one.by) for one in of_ranks}) == 1
        if paired and (why := _clips_apart(of_ranks)) is not None:
            told, fix = why
            explained = replace(finding, evidence=(*finding.evidence, f"{first.by} {told}"), fix=fix)
            return explained.relocated(first.location, "optimizer steps")
    return None


def _clips_apart(of_ranks: Sequence[GradientsClipped]) -> tuple[str, str] | None:
    """Return how one clip differs between ranks, and the fix, or `None`."""
    norms, limits = [one.norm for one in of_ranks], [one.limit for one in of_ranks]
    if of_ranks[0].of_parts and not are_close(norms) and max(norms) > max(limits) > 0:
        return (
            f"computes a norm there of {_by_rank(norms)}; ranks have rank-local parameters",
            "Clip by a norm over all ranks: add up the squared norms of the rank-local parameters with an all_reduce, "
            "and those of the other parameters once.",
        )
    if are_close(norms) and not are_close(limits) and norms[0] > min(limits) > 0 and of_ranks[0].location is not None:
        return (
            f"gets a different limit there: {_by_rank(limits)}",
            "Clip to the same limit on every rank: all_reduce the values that it is computed from before the call.",
        )
    return None


def _by_rank(values: Sequence[float]) -> str:
    return "; ".join(group_by_value([spelled(value) for value in values]))


def judge_clips(clips: Clips, steps: Sequence[Sequence[Steps]]) -> list[Finding]:
    """Report gradients clipped by each rank's own norm before the average (DDP310)."""
    at = [
        of_ranks for of_ranks in zip(*clips, strict=False) if len({(one.count, one.location) for one in of_ranks}) == 1
    ]
    at = [of_ranks for of_ranks in at if not of_ranks[0].of_parts]
    apart = [of_ranks for of_ranks in at if not are_close([one.norm for one in of_ranks])]
    if any(len({(one.step, one.location) for one in of_rank}) < len(of_rank) for of_rank in clips):
        return []  # several clips per step, such as one per sample
    averaged = [one for of_one in steps for one in of_one if all_gradients_agree(one)]
    if len(apart) < 2 or 2 * len(apart) <= len(at) or not averaged or len(averaged) < sum(map(len, steps)):
        return []
    first = apart[0]
    return one_finding(
        "DDP310",
        (first[0].by,),
        f"{first[0].by} sees different gradients on each rank: it clips gradients that are averaged later.",
        location=first[0].location,
        evidence=[f"rank {rank}: a norm of {one.norm:.6g}" for rank, one in enumerate(first[:4])],
        fix=f"Call {first[0].by} after the gradients have been averaged, and before the optimizer's step.",
    )


def judge_changed(changes: Sequence[Sequence[GradientsChanged]]) -> list[Finding]:
    """Report gradients that are clipped or changed between micro-batches (DDP310).

    Local gradients are changed by rank-dependent factors. Averaged gradients are changed equally, so only calls of
    known clip functions count.
    """
    at = [
        of_ranks
        for of_ranks in zip(*changes, strict=False)
        if len({(one.wrapper, one.step, one.by, one.location) for one in of_ranks}) == 1
    ]
    own = [of_ranks for of_ranks in at if all(one.put_off for one in of_ranks)]
    apart = [of_ranks for of_ranks in own if not are_close([one.factor for one in of_ranks])]
    clipped = [of_ranks for of_ranks in at if of_ranks[0].by and not any(one.put_off for one in of_ranks)]
    found = apart if len(apart) > 1 and 2 * len(apart) > len(own) else clipped
    if len(found) < 2:
        return []
    first = found[0]
    what = first[0].by or "The script"
    each = "by its own factor on each rank, before they are averaged" if found is apart else "before the step has all"
    return one_finding(
        "DDP310",
        (first[0].by or "gradients",),
        f"{what} changes the gradients after each micro-batch, {each}; those of the next micro-batch are added to the "
        "changed ones.",
        location=first[0].location,
        evidence=[f"rank {rank}: it multiplies their norm by {one.factor:.4g}" for rank, one in enumerate(first[:4])],
        severity=Severity.ERROR if found is apart else Severity.WARNING,
        fix=f"Call {first[0].by or 'it'} once a step, after its last backward pass and before the optimizer's step.",
    )


def judge_hooked(hooked: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report hooks that change local gradients differently on each rank (DDP310).

    Limits on the size of elements always count, because clamping does not commute with the average. Factors of a
    weighted average and weights of batches are intended.
    """
    by_step = [{one.step: one.changed for one in of_rank} for of_rank in hooked]
    told: dict[str, dict[str, list[int]]] = {}  # by kind of change and parameter: steps
    for step in steps:
        of_ranks = [of_rank.get(step, {}) for of_rank in by_step]
        for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
            if why := _hooked_apart([of_rank.get(name, _AS_IT_WAS) for of_rank in of_ranks]):
                told.setdefault(why, {}).setdefault(name, []).append(step)
    for why in ("scaled", "masked", "limited"):
        names = [name for name, when in told.get(why, {}).items() if len(when) >= _FEWEST_HOOKED]
        of_one = told[why][names[0]] if names else []
        if names and not (why == "scaled" and _are_weights(by_step, names, of_one)):
            return _finding_of_hooks(hooked, [of_rank.get(of_one[0], {}) for of_rank in by_step], names, why, of_one)
    return _hooked_in_modules(hooked, steps)


def judge_scaled_by_hooks(
    hooked: Sequence[Sequence[GradientsHooked]], steps: Sequence[int], parameters: Collection[str]
) -> list[Finding]:
    """Report hooks that scale all gradients by the world size or inverse (DDP303)."""
    size, wanted = len(hooked), set(steps)
    if len(steps) < _FEWEST_HOOKED or any(wanted - {one.step for one in of_rank} for of_rank in hooked):
        return []
    passes = [one.changed for of_rank in hooked for one in of_rank if one.step in wanted]
    known = [change for changed in passes for change in changed.values() if change.kind]  # others are too small
    if not known or not parameters or not all(changed.keys() >= set(parameters) for changed in passes):
        return []
    for factor, words in ((size, f"{size} (the world size)"), (1 / size, f"1/{size} (one over the world size)")):
        if all(one.kind == "scaled" and math.isclose(one.number, factor, rel_tol=_TOLERANCE) for one in known):
            return one_finding(
                "DDP303",
                sorted(parameters),
                f"A hook multiplies the gradients of each rank by {words}, and DDP averages over the ranks: the "
                f"optimizer uses {factor:.4g} times the gradient of the mean.",
                location=next((one.location for of_rank in hooked for one in of_rank if one.location), None),
                evidence=[f"in all {len(steps)} steps that were compared, on every rank"],
                fix="Remove the hook: DDP already averages the gradients.",
            )
    return []


def _hooked_in_modules(hooked: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report module backward hooks that scale by a constant factor per rank (DDP310).

    A factor that changes between steps may depend on the samples, as in a single process.
    """
    by_step = [{one.step: one.factors for one in of_rank if one.step in steps} for of_rank in hooked]
    for name in dict.fromkeys(name for of_rank in by_step for factors in of_rank.values() for name in factors):
        when = sorted({step for of_rank in by_step for step, factors in of_rank.items() if name in factors})
        of_ranks = [[of_rank.get(step, {}).get(name, 1.0) for step in when] for of_rank in by_step]
        if len(when) >= _FEWEST_HOOKED and not any(map(_are_apart, of_ranks)):
            changes = [HookedGradient("scaled", factors[0]) for factors in of_ranks]
            if _hooked_apart(changes):
                return _finding_of_hooks(hooked, [{name: one} for one in changes], [name], "scaled", when)
    return []


_Hooked = Mapping[int, Mapping[str, HookedGradient]]
"""Gradient changes by hooks on one rank, by step and parameter name."""
_AS_IT_WAS = HookedGradient("scaled", 1.0)
_FEWEST_HOOKED = 2  # steps


def _hooked_apart(of_ranks: Sequence[HookedGradient]) -> str:
    """Return how hooks change a gradient differently between ranks, or '' if unknown."""
    kinds = {one.kind for one in of_ranks}
    if "limited" in kinds:
        return "limited"
    if "" in kinds:
        return ""
    if len(kinds) > 1 or len({one.zeros for one in of_ranks}) > 1:
        return "masked"
    factors = [one.number for one in of_ranks]
    average = sum(factors) / len(factors)
    return "scaled" if _are_apart(factors) and abs(average - 1.0) > _FACTORS_APART else ""


def _are_weights(by_step: Sequence[_Hooked], names: Sequence[str], steps: Sequence[int]) -> bool:
    """Check if each rank scales all gradients by one changing factor: batch weights.

    The script may divide by the sum of weights after the average. A factor on one gradient may have another purpose.
    """
    weights: list[list[float]] = []
    for step in steps:
        of_ranks = [
            [one.number for name, one in of_rank.get(step, {}).items() if name in names] or [1.0] for of_rank in by_step
        ]
        if any(map(_are_apart, of_ranks)):
            return False
        weights.append([factors[0] for factors in of_ranks])
    return len(names) > 1 and any(map(_are_apart, zip(*weights, strict=True)))


_FACTORS_APART = 0.01


def _are_apart(factors: Sequence[float]) -> bool:
    return max(factors) - min(factors) > _FACTORS_APART * max(map(abs, factors))


def _finding_of_hooks(
    hooked: Sequence[Sequence[GradientsHooked]],
    first: Sequence[Mapping[str, HookedGradient]],
    names: Sequence[str],
    why: str,
    steps: Sequence[int],
) -> list[Finding]:
    changes = [of_rank.get(names[0], _AS_IT_WAS) for of_rank in first]
    what = {
        "scaled": "multiplies each rank's own gradient by a different factor",
        "masked": "sets different elements of the gradient to zero on each rank",
        "limited": "limits the elements of each rank's own gradient",
    }[why]
    number = {"scaled": "times {0:.4g}", "masked": "a different mask", "limited": "cut off at {0:.4g}"}[why]
    said = ["no element is changed" if one == _AS_IT_WAS else number.format(one.number) for one in changes]
    return one_finding(
        "DDP310",
        names,
        f"A hook {what} before the gradients are averaged: the average differs from the result of the hook on the "
        "gradient of the global batch.",
        steps=steps[:1],
        location=next((one.location for of_rank in hooked for one in of_rank if one.location is not None), None),
        evidence=[f"{names[0]}: {'; '.join(group_by_value(said))}", f"so in {len(steps)} steps that were compared"],
        severity=Severity.WARNING if why == "limited" else Severity.ERROR,
        fix="Change the gradients after backward has returned, when they are averaged; or by the same mask and factor "
        "on every rank.",
    )


def judge_rescaled(used: Sequence[Used], losses: Sequence[Sequence[LossDifferentiated]], size: int) -> list[Finding]:
    """Report averaged gradients scaled by the world size or its inverse (DDP303).

    Needs a measured factor and a line that scales by the world size, because a factor such as 1/2 may be intended.
    Losses that are also scaled by the world size, and optimizers invariant to gradient scale, are left out.
    """
    every = [one for of_rank in losses for one in of_rank]
    if size < 2 or not all(used) or not every or any(one.scaled for one in every):
        return []
    step = used[0][0][0]
    if step.rescaled_at is None or step.options.get("class", "").startswith(SCALE_FREE):
        return []
    factors = [_factor_of(step, left) for of_rank in used for step, left in of_rank]
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
        location=step.rescaled_at,
        evidence=[
            f"in all {len(known) // len(used)} steps that were compared, on every rank: a norm of {known[0]:.6g} times "
            "that of the average",
        ],
        related={"optimizer steps": step.location},
        severity=Severity.WARNING,
        fix="Leave out the factor of dist.get_world_size(): DDP has divided the sum of the gradients by it.",
    )


def _factor_of(step: OptimizerStep, left: ReplicaCaptured) -> float | None:
    """Return the constant factor from reduced to used gradients, or None.

    Only small gradients count, because their sketches have exact norms.
    """
    factors = [factor for factor in _factors(step, left) if factor > 0]
    alike = bool(factors) and max(factors) - min(factors) <= _TOLERANCE * max(factors)
    return sum(factors) / len(factors) if alike else None


def _factors(step: OptimizerStep, left: ReplicaCaptured) -> Iterator[float]:
    for name, numbers in left.averaged.items():
        if 0 < len(numbers) <= _EXACT and (there := math.hypot(*numbers)) > LEAST:
            yield step.norms.get(f"{left.wrapper}/{name}", 0.0) / there
