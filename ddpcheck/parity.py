"""DDP303 to 310: what data parallelism itself changed, and the pattern that names the cause.

Pure functions from measured differences (`ddpcheck.gather.compare`, `ddpcheck.reference`) to findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpcheck.evidence import Call, Difference, GradientHook, ShardAnalysis, WrapperFacts
from ddpcheck.findings import Finding, Location, Severity
from ddpcheck.program import judge_program_data, judge_programs
from ddpcheck.wording import Names, listed, make_finding, spelled


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What else is known when a difference is to be explained.

    Attributes:
        names: How to speak of parameters.
        wrapper: What the wrapper was told.
        world_size: Number of ranks.
        losses: Of each rank.
        shard_sizes: Samples a rank, where they are known.
        collectives: What the forward pass called, without a derivative, on rank 0.
        gathers: What it called at all.
        module_locations: The lines that made the modules.
        local_buffers: Buffers that a step by itself leaves different on the ranks.
        broadcasts_buffers: Whether the wrapper broadcasts buffers before a forward.
        held: Plain values that each rank's program holds, spelled, by name.
        apart: Parameters that differed between ranks before the first step.
        wrapper_class: What the wrapper is.
        nonlinear: Parameters whose gradient does not double with the loss, on a rank.
        hooks: What the user's code puts in the way of gradients.
        backwards: Backward passes in a step, of the single process and of a rank.
        loss_location: The line that defines the loss.
        wrap_hooks: Those of them that are put there while wrapping, and so only under the wrapper.
        differs: Whether the ranks' average is another gradient than the global batch's.
    """

    names: Names
    wrapper: WrapperFacts
    world_size: int
    losses: tuple[float, ...] = ()
    shard_sizes: tuple[int, ...] = ()
    collectives: tuple[Call, ...] = ()
    gathers: tuple[Call, ...] = ()
    module_locations: Mapping[str, Location] = field(default_factory=dict)
    local_buffers: tuple[str, ...] = ()
    broadcasts_buffers: bool = False
    held: Sequence[Mapping[str, str]] = ()
    apart: frozenset[str] = frozenset()
    wrapper_class: str = ""
    nonlinear: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()
    backwards: tuple[int, int] = (1, 1)
    loss_location: Location | None = None
    wrap_hooks: tuple[GradientHook, ...] = ()
    differs: bool = False


LOOSEST_FIT = 0.05
"""A pattern explains a difference when it leaves less than this share of it (and the rest is rounding)."""


def spelled_factor(ratio: float, world_size: int) -> str:
    """A factor in words, where it is one that the world size explains."""
    for text, value in ((f"1/{world_size}", 1 / world_size), (str(world_size), float(world_size))):
        if math.isclose(ratio, value, rel_tol=1e-2):
            return f"{text} (one over the world size)" if text.startswith("1/") else f"{text} (the world size)"
    return f"{ratio:.4g}"


def some_steps(steps: Sequence[int], of: int) -> tuple[int, ...]:
    """`steps`, or nothing where they are all of them."""
    return tuple(steps) if len(steps) < of else ()


def judge_single_process(
    differences: Mapping[int, Sequence[Difference]], analysis: ShardAnalysis | None, known: Circumstances
) -> list[Finding]:
    """DDP303, 304, 305, 309 and 310: what data parallelism itself changed.

    Args:
        differences: By step: the ranks' averaged gradients against the global batch's.
        analysis: Of the first step that differs.
        known: What else is known.
    """
    bad = {step: [item for item in items if item.bad] for step, items in differences.items()}
    bad = {step: items for step, items in bad.items() if items}
    if not bad or analysis is None:
        return []
    first = bad[min(bad)]
    worst = sorted(first, key=lambda item: -float(f"{item.error:.2g}"))
    total = len(differences[min(bad)])
    steps = some_steps(sorted(bad), len(differences))
    facts = [f"{len(first)} of {total} gradients differ from the single process", *(item.tell() for item in worst[:3])]
    tolerance = min(max(max(item.tolerance for item in first), 1e-6), LOOSEST_FIT)
    far = max(item.error for item in first)
    ran = bool(analysis.weights)
    world_changed = ran and (abs(analysis.world_ratio - 1) > tolerance or analysis.world_residual > tolerance)
    scaled = _is_explained(analysis.global_ratio, analysis.global_residual, tolerance)
    by_world = world_changed and _is_explained(analysis.world_ratio, analysis.world_residual, tolerance)
    blind = [call for call in known.collectives if _may_carry_the_loss(call)] if world_changed or not ran else []
    blind.sort(key=lambda call: (not call.carries_gradient, -call.elements))
    changed = _judge_changed_gradients(first, far, steps, analysis, known, facts, world_changed=world_changed)
    if changed is not None:
        return [changed]
    alone, here = known.backwards
    if scaled and alone != here and math.isclose(analysis.global_ratio, here / alone, rel_tol=1e-2):
        return [
            make_finding(
                "DDP514",
                ("loss",),
                "The loss accumulates gradients over micro-batches and does not divide by their number, which is "
                f"another on a rank: the gradient is {analysis.global_ratio:.4g} times the global batch's.",
                steps=steps,
                location=known.loss_location,
                evidence=[f"{alone} backward passes in the single process, {here} on a rank", *facts],
            )
        ]
    if scaled and not by_world and (world_changed or not ran) and not any(call.elements > 1 for call in blind):
        # Shards alone give other gradients, or cannot be run alone: the loss values must tell.
        if _losses_are_scaled(analysis.shard_losses, known.losses, analysis.global_ratio):
            by_world, analysis = True, replace(analysis, world_ratio=analysis.global_ratio)
        elif _are_all(known.losses, analysis.global_loss):
            return [_judge_own_share(analysis, known, steps, facts)]
        else:
            weight = 1 / (known.world_size * analysis.global_ratio)
            return [_judge_weights(replace(analysis, weights=(weight,) * known.world_size), known, steps, facts)]
    if by_world:
        return [
            make_finding(
                "DDP303",
                ("loss",),
                f"Every gradient is {spelled_factor(analysis.world_ratio, known.world_size)} times that of the same "
                "shards without a process group: the model or the loss scales by the world size, and DDP averages "
                "already.",
                steps=steps,
                evidence=facts,
            )
        ]
    if world_changed and (derived := judge_program_data(known.held, far=far, steps=steps, facts=facts)):
        return derived
    communicates = bool(known.collectives or known.gathers)
    if world_changed and not communicates and analysis.rank_residual > tolerance:
        deliberate = known.wrapper.find_unused_parameters
        apart = judge_programs(known.losses, analysis.shard_losses, deliberate=deliberate, steps=steps, facts=facts)
        if apart:
            return apart
    if world_changed and analysis.rank_residual <= tolerance:
        share = ", ".join(f"{weight:.4g}" for weight in analysis.rank_weights)
        return [
            make_finding(
                "DDP303",
                ("loss",),
                f"The ranks weigh their gradients by {share} and not by {1 / known.world_size:.4g} each: the loss or "
                "the model applies a factor that depends on the rank.",
                steps=steps,
                evidence=facts,
            )
        ]
    if blind:
        calls = list(dict.fromkeys(str(call) for call in blind))
        path, _, at = next((call.location for call in blind if call.location), "").rpartition(":")
        return [
            make_finding(
                "DDP309",
                tuple(dict.fromkeys(call.operation for call in blind)),
                f"The forward pass calls {calls[0]}, through which no gradient flows, and the averaged gradients are "
                f"{far:.2g} away from those of the global batch.",
                steps=steps,
                location=Location(path, int(at)) if path else None,
                evidence=[*(f"called: {call}" for call in calls[1:]), *facts],
                fix=fix_without_gradient(blind),
            )
        ]
    even = all(abs(weight * known.world_size - 1) <= tolerance for weight in analysis.weights)
    if ran and not world_changed and analysis.weights_residual <= tolerance and not even:
        if scaled:  # with a common factor there is no need to tell the ranks' weights apart
            weight = 1 / (known.world_size * analysis.global_ratio)
            analysis = replace(analysis, weights=(weight,) * known.world_size)
        return [_judge_weights(analysis, known, steps, facts)]
    found = []
    if not world_changed and analysis.summed:
        terms = max(len(analysis.weights) // known.world_size, 1)
        which = "The loss" if len(analysis.summed) == terms else f"Term {analysis.summed[0]} of {terms} of the loss"
        found.append(
            make_finding(
                "DDP305",
                ("loss",),
                f"{which} sums over samples, and DDP averages over ranks: its gradient is about 1/{known.world_size} "
                "of the global batch's.",
                steps=steps,
                location=known.loss_location,
                evidence=["its gradient doubles when every sample is in the batch twice", *facts],
            )
        )
    if not ran:
        return found or [
            make_finding(
                "DDP304",
                ("loss",),
                f"Gradients on shards are up to {far:.2g} (relative) away from the global batch's, and the shards "
                "cannot be run one by one to tell why.",
                steps=steps,
                evidence=facts,
                severity=Severity.ERROR,
            )
        ]
    where = (
        f"{analysis.module or 'the model itself'} ({analysis.module_class})" if analysis.module_class else "the loss"
    )
    line = analysis.line
    how = (
        f"the output of {where} for one sample depends on the other samples of the batch"
        if analysis.module_class
        else "no module mixes samples: the loss itself couples them"
    )
    found.append(
        make_finding(
            "DDP304",
            (analysis.module or "loss",),
            f"Samples are coupled through {where}, so gradients on shards are up to {far:.2g} (relative) away from "
            "those of the global batch.",
            steps=steps,
            location=known.module_locations.get(analysis.module) if analysis.module else line or known.loss_location,
            evidence=[how, *([f"samples first meet at {line}"] if line else []), *facts],
        )
    )
    return found


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
    """What to call instead of collectives through which no gradient flows; empty where torch has no such function."""
    names = dict.fromkeys(call.operation for call in calls)
    instead = [next((known for known in _WITH_GRADIENT if name.startswith(known)), "") for name in names]
    if not all(instead):
        return ""
    spoken = listed([f"torch.distributed.nn.functional.{name}" for name in dict.fromkeys(instead)])
    advice = f"Use {spoken} instead, through which gradients come back from all ranks."
    if any("gather" in name for name in names):
        advice += " The local tensor, put back into what was gathered, gets the gradient of this rank's loss alone."
    if any("reduce" in name for name in names):
        advice += " Reduce a number that is only logged on a detached copy."
    return advice


def _may_carry_the_loss(call: Call) -> bool:
    """Whether what comes out of a collective may be part of the loss: not a barrier, an object, or a logged number."""
    return not call.differentiable and call.elements > 0 and (call.elements > 1 or call.carries_gradient)


def _judge_changed_gradients(
    wrong: Sequence[Difference],
    far: float,
    steps: tuple[int, ...],
    analysis: ShardAnalysis,
    known: Circumstances,
    facts: Sequence[str],
    *,
    world_changed: bool,
) -> Finding | None:
    """DDP310: something on the way of the gradients changes them, by what they are or by the rank that they are on."""
    names = [item.name for item in wrong]
    nonlinear = [name for name in known.nonlinear if name in names]
    by_rank = (
        world_changed
        and known.hooks
        and not known.collectives
        and len(analysis.shard_losses) == len(known.losses)
        and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(analysis.shard_losses, known.losses, strict=True))
    )
    if not nonlinear and not by_rank:
        return None
    where = next((hook.location for hook in known.hooks if hook.location), None)
    subjects = known.names.subjects(known.nonlinear if nonlinear else names)
    said = f"{known.hooks[0].what[0].upper()}{known.hooks[0].what[1:]}" if known.hooks else "Something in backward"
    return make_finding(
        "DDP310",
        subjects,
        f"{said} changes the local gradient of {listed(subjects)} before it is averaged, and the result is {far:.2g} "
        "away from that of the global batch.",
        steps=steps,
        location=where or known.names.location(names),
        evidence=[
            "a loss twice as large does not give gradients twice as large: what happens in backward is not linear"
            if nonlinear
            else "the losses are those of the same shards without a process group; only the gradients are not",
            *(f"in the way of gradients: {hook}" for hook in known.hooks[:3]),
            *facts,
        ],
    )


def _judge_own_share(
    analysis: ShardAnalysis, known: Circumstances, steps: tuple[int, ...], facts: list[str]
) -> Finding:
    calls = [str(call) for call in known.gathers]
    return make_finding(
        "DDP303",
        ("loss",),
        f"Every gradient is {spelled_factor(analysis.global_ratio, known.world_size)} times the global batch's: each "
        "rank computes the loss of the whole batch, its gradient comes back to the rank's own samples only, and DDP "
        "averages.",
        steps=steps,
        location=known.loss_location,
        evidence=[
            f"every rank's loss is {analysis.global_loss:.4g}, that of the global batch",
            *(f"gathered by {call}" for call in calls[:2]),
            *facts,
        ],
    )


def _are_all(values: Sequence[float], wanted: float) -> bool:
    return bool(values) and all(math.isclose(value, wanted, rel_tol=1e-3) for value in values)


def _is_explained(ratio: float, residual: float, tolerance: float) -> bool:
    """Whether a constant factor other than 1 accounts for a difference."""
    return abs(ratio - 1) > tolerance and residual <= max(tolerance, LOOSEST_FIT * abs(1 - ratio))


def _losses_are_scaled(alone: Sequence[float], together: Sequence[float], ratio: float) -> bool:
    """Whether the losses on the ranks are nearer to `ratio` times those of the shards alone than to the same."""
    pairs = [(a, t) for a, t in zip(alone, together, strict=False) if a * t > 0]
    if not pairs or ratio <= 0:
        return False
    middle = sum(math.log(t / a) for a, t in pairs) / len(pairs)
    return abs(middle - math.log(ratio)) < abs(middle)


def _judge_weights(analysis: ShardAnalysis, known: Circumstances, steps: tuple[int, ...], facts: list[str]) -> Finding:
    terms = max(len(analysis.weights) // known.world_size, 1)
    by_term = [analysis.weights[term::terms] for term in range(terms)]
    spoken = "; ".join(", ".join(f"{weight:.4g}" for weight in weights) for weights in by_term)
    summed = [all(math.isclose(weight, 1.0, rel_tol=1e-3) for weight in weights) for weights in by_term]
    if any(summed) and known.world_size > 1:
        which = "The loss" if all(summed) else f"Term {summed.index(True)} of {terms} of the loss"
        message = (
            f"{which} sums over samples, and DDP averages over ranks: its gradient is 1/"
            f"{known.world_size} of the global batch's."
        )
        why = "the gradients of the shards add up to the global batch's"
    else:
        message = (
            "The loss is normalised by a count that differs between ranks, so the mean of the ranks' gradients is not "
            "the gradient of the global batch."
        )
        why = f"the global batch weighs the ranks by {spoken}; DDP weighs each by {1 / known.world_size:.4g}"
    if analysis.count and analysis.count != "samples":
        why = f"{analysis.count}: {' and '.join(f'{count:g}' for count in analysis.counts)} on the ranks; {why}"
    sizes = [f"samples a rank: {', '.join(map(str, known.shard_sizes))}"] if len(set(known.shard_sizes)) > 1 else []
    return make_finding(
        "DDP305", ("loss",), message, steps=steps, location=known.loss_location, evidence=[why, *sizes, *facts]
    )


def judge_nothing_compared(norms: Mapping[int, float]) -> list[Finding]:
    """DDP307 when every gradient was zero or missing (norm of all single-process or local gradients, by step)."""
    empty = sorted(step for step, norm in norms.items() if norm == 0.0)
    if not norms or len(empty) < len(norms):
        return []
    return [
        make_finding(
            "DDP307",
            ("loss",),
            "Every gradient was zero or missing in every step, so nothing was compared.",
            evidence=["a comparison of zeros with zeros would pass whatever DDP did"],
        )
    ]


def judge_repeat(differences: Mapping[int, Sequence[Difference]], step: int) -> list[Finding]:
    """DDP308 when the same step, run twice on a rank from the same state, gave other gradients (by rank)."""
    bad = {rank: [item for item in items if item.bad] for rank, items in differences.items()}
    ranks = tuple(sorted(rank for rank, items in bad.items() if items))
    if not ranks:
        return []
    worst = max((item for items in bad.values() for item in items), key=lambda item: item.error)
    return [
        make_finding(
            "DDP308",
            ("loss",),
            f"The same step run twice on {spelled(ranks)} gave other gradients, so comparisons mean nothing.",
            ranks=ranks if len(ranks) < len(differences) else (),
            steps=(step,),
            evidence=[worst.tell(), "the generators of torch, numpy and random were seeded alike both times"],
        )
    ]
