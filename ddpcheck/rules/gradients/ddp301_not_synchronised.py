"""DDP301 not-synchronised: error, needs_average, spreads, gradients_differ, keeps_results

A gradient differs between ranks after a backward pass that should have synchronised it.

Why: When DDP works, every rank holds bit-identical gradients after backward. A difference means that the reducer did
    not average this parameter: its bucket never filled, its hooks are gone, or the inner module was called instead of
    the wrapper. Each rank now trains its own model. (PyTorch docs, DistributedDataParallel; notes on DDP.)
Fix: Call the wrapper, not ddp.module; leave no_sync before the last backward pass; wrap the module once it is
    complete; and fix unused parameters (DDP1xx) first.
Detected: After a backward pass that synchronises, the ranks compare each gradient, bit by bit. Correct gradients are
    bit-identical, so there is no tolerance. If a rule for the cause applies (DDP101, DDP501, DDP503 and others), that
    rule is reported instead.
Ignore: If each rank changes its gradients on purpose after they were averaged.
Line: The line that changes averaged gradients differently on each rank: a clip, the load of a GradScaler's state, or
    another write. If no such line is known: the optimizer's step. For gradients that DDP leaves different: the call
    that registers the communication hook, else the line that creates the first parameter. For a model split over
    ranks: the line that splits it, or seeds it differently.
Checks: report reducer; run replicas, optimizers; repro reduction
Repeats: ModelParts, HandSplit, GradientChanges, Optimizers
Explains: DDP306; quietly DDP214 if of a copy
Reports: pytorch/pytorch#112152 pytorch/pytorch#109191
Example:
    output = ddp.module(x)                   # right: output = ddp(x)
    output.sum().backward()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ddpcheck.findings.evidence.replicas import ModelSplit
from ddpcheck.findings.evidence.script import GradientsClipped
from ddpcheck.findings.evidence.steps import CompiledStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    capitalized,
    format_by_rank,
    format_ranks,
    format_steps,
    group_by,
    group_by_value,
    join_names,
    make_finding,
    minority_ranks,
    new_finding,
    plural,
    plural_verb,
    ranks_or_all,
)
from ddpcheck.rules.replicas.changes import locate_reduction
from ddpcheck.stream.entries import PeerReceived, ReplicaCaptured
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.check_context import JudgeContext, group_by_step
from ddpcheck.trace.gradients import AVERAGE_ALL, RETURN_AVERAGE, UNEQUAL, Clips, ReducerFacts, paired
from ddpcheck.trace.model_parts import MIN_PART_STEPS, hand_split
from ddpcheck.trace.replicas import aligned, common_values, differing_names
from ddpcheck.trace.script_facts import PartSteps, WrapperTrace, entries_of
from ddpcheck.trace.unwrapped_params import (
    Steps,
    are_close,
    are_near,
    format_norm,
    gradients_differ,
    minority_of,
    names_differing,
    names_scaled,
    param_name,
)

MIN_SPLIT_STEPS = 3
"""Fewest recorded steps from which `judge_hand_split` concludes: in fewer, ranks may differ by chance."""

CHANGE_FIX = (
    "Clip, scale, mask and add noise in the same way on every rank; all_reduce the values first that depend on local "
    "data."
)
NAME_IN_PLAN = (
    "Name these modules in the plan of parallelize_module (SequenceParallel() for a norm), or all_reduce their "
    "gradients over the group of tensor parallelism before the step."
)


def explain_by_parts_of_models(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that differ only within tensor parallel groups (DDP301)."""
    models = facts.known.models
    names_within = {name for model in models for name in _names_unequal_on(facts, model)}
    names_between = {name for replicas in zip(*models, strict=True) for name in _names_unequal_on(facts, replicas)}
    names = [name for name in facts.unequal if name in names_within and name not in names_between]
    if not names:
        return []
    return facts.known.names.new_finding(
        "DDP301",
        names,
        f"The gradients of {join_names(facts.known.names.subjects(names))} differ between "
        f"{' and between '.join(map(format_ranks, models[:2]))}, which compute one model together (tensor "
        "parallelism): each rank has the gradient of its part.",
        steps=ranks_or_all(sorted({step for name in names for step in facts.unequal[name]}), facts.step_count),
        evidence=[facts.differing_losses, *facts.evidence_between_ranks],
        fix=NAME_IN_PLAN,
        tags=(UNEQUAL,),
    )


def _names_unequal_on(facts: ReducerFacts, ranks: Sequence[int]) -> set[str]:
    by_step = group_by_step(item for item in facts.evidence if item.rank in ranks)
    return {name for items in by_step.values() for name in differing_names([item.gradients for item in items])}


def explain_by_missing_reduction(facts: ReducerFacts) -> list[Finding]:
    """Report gradients that differ between ranks although the wrapper was called (DDP301).

    Runs before comparisons with the average, because gradients that differ between ranks need no reference.
    """
    names = facts.not_synchronised
    if not names:
        return []
    count = len(facts.evidence[0].gradients)
    steps = sorted({step for name in names for step in facts.unequal[name]})
    is_known = facts.known.wrapper.is_ddp or facts.known.wrapper.sharded
    wrapper_note = f"the wrapper is a {facts.known.wrapper_class}, not a DistributedDataParallel"
    fix = RETURN_AVERAGE if facts.known.wrapper.comm_hook else "" if is_known else AVERAGE_ALL
    if facts.known.wrapper.named == "tensor parallelism":
        fix = 'Average them in the data dimension too: DistributedDataParallel(model, device_mesh=mesh["dp"]), or '
        fix += 'fully_shard(model, mesh=mesh["dp"]).'
    return facts.known.names.new_finding(
        "DDP301",
        names,
        f"The gradients of {'all' if len(names) == count else f'{len(names)} of'} {plural(count, 'parameter')} "
        f"differ between ranks after backward, from {format_steps(steps[:1])} on.",
        steps=ranks_or_all(steps, facts.step_count),
        evidence=["" if is_known else wrapper_note, *facts.evidence_between_ranks],
        fix=fix,
        tags=(UNEQUAL,),
    )


def judge_compiled_ranks(items: Sequence[CompiledStep], known: JudgeContext) -> list[Finding]:
    """Report gradients of one step that differ between ranks only under `torch.compile` (DDP301)."""
    names = list(differing_names([item.gradients for item in items]))
    if not names:
        return []
    return known.names.new_finding(
        "DDP301",
        names,
        f"Under torch.compile the gradients of {len(names)} of {len(items[0].gradients)} parameters differ between "
        f"ranks after backward, in step {items[0].step}; without it they are equal.",
        steps=(items[0].step,),
    )


def judge_step_gradients(steps: Sequence[Steps], clips: Clips = ()) -> list[Finding]:
    """Report averaged gradients that differ between ranks at the optimizer step (DDP301)."""
    for by_rank in steps:
        if not all(step.averaged for step in by_rank) or len({step.reductions for step in by_rank}) > 1:
            continue
        unaveraged = {name for step in by_rank for name in step.unaveraged}
        norms = [step.norms for step in by_rank]
        if names := [name for name in names_differing(norms) if name not in unaveraged]:
            shown = {param_name(n): [format_norm(rank_norms.get(n)) for rank_norms in norms] for n in names[:3]}
            message = (
                f"The averaged {plural_verb('gradient', 'gradients', names)} of "
                f"{join_names([*map(param_name, names)])} {plural_verb('was', 'were', names)} changed after backward, "
                "differently on each rank."
            )
            evidence = [f"norm before the optimizer's step: {text}" for text in format_by_rank(shown)]
            return _changed_finding(by_rank, clips, names, message, minority_of(norms, names), evidence)
    return []


def judge_scaled_by_hand(steps: Sequence[Steps], clips: Clips = ()) -> list[Finding]:
    """Report gradients that the script averages, then scales differently on each rank (DDP301)."""
    for by_rank in steps:
        names = [name for name in by_rank[0].local_params if gradients_differ(by_rank, name)]
        if len(names) < 2 or len(names_scaled(names, by_rank)) < len(names):
            continue
        sizes = [math.hypot(*step.gradients[names[0]]) for step in by_rank]
        ranks = minority_ranks([round(size / max(sizes), 3) for size in sizes]) if len(sizes) > 2 else ()
        message = (
            f"The gradients of {join_names([*map(param_name, names)])} are those of the other ranks times a factor: "
            "they were scaled after the ranks had averaged them, differently on each rank."
        )
        evidence = [f"norm of {param_name(names[0])}: {_format_by_rank(sizes)}"]
        return _changed_finding(by_rank, clips, names, message, ranks, evidence)
    return []


def _changed_finding(
    steps: Steps, clips: Clips, names: Sequence[str], message: str, ranks: Sequence[int], evidence: Sequence[str]
) -> list[Finding]:
    """Create a DDP301 at the line that made averaged gradients differ between ranks."""
    first, scales = steps[0], [step.scale for step in steps]
    at_step: dict[str, Any] = {"ranks": ranks, "steps": (first.count,), "location": first.location}
    finding = make_finding("DDP301", [*map(param_name, names)], message, **at_step, evidence=evidence, fix=CHANGE_FIX)
    if len(set(scales)) > 1:
        text = f"the scale of the GradScaler: {_format_by_rank(scales)}"
        fix = "Load the same state into the GradScaler on every rank, or on none; the same init_scale likewise."
        load_line = next((step.scale_at for step in steps if step.scale_at is not None), None)
        return [replace(finding, evidence=(*evidence, text), fix=fix).relocated(load_line, "optimizer steps")]
    return [
        _relocate_to_clip(finding, clips) or finding.relocated(first.changed_at or first.reduced_at, "optimizer steps")
    ]


def _relocate_to_clip(finding: Finding, clips: Clips) -> Finding | None:
    early = [(r, clip) for r, rank_clips in enumerate(clips) for clip in rank_clips if clip.step <= finding.steps[0]]
    if not all(clips) and (clipped := {rank: clip for rank, clip in early if clip.norm > clip.limit}):
        first = next(iter(clipped.values()))
        fix = f"Call {first.by} on every rank, or on none."
        return replace(_explain_by_clip(finding, first, "is called there, on no other rank", fix), ranks=tuple(clipped))
    for by_rank in paired(clips, lambda clip: (clip.count, clip.step, clip.location, clip.by)):
        if (difference := _clip_difference(by_rank)) is not None:
            return _explain_by_clip(finding, by_rank[0], *difference)
    return None


def _explain_by_clip(finding: Finding, clip: GradientsClipped, message: str, fix: str) -> Finding:
    explained = replace(finding, evidence=(*finding.evidence, f"{clip.by} {message}"), fix=fix)
    return explained.relocated(clip.location, "optimizer steps")


def _clip_difference(clips: Sequence[GradientsClipped]) -> tuple[str, str] | None:
    norms, limits = [clip.norm for clip in clips], [clip.limit for clip in clips]
    if clips[0].of_parts and not are_close(norms) and max(norms) > max(limits) > 0:
        return (
            f"computes a norm there of {_format_by_rank(norms)}; ranks have rank-local parameters",
            "Clip by a norm over all ranks: add up the squared norms of the rank-local parameters with an all_reduce, "
            "and those of the other parameters once.",
        )
    if are_close(norms) and not are_close(limits) and norms[0] > min(limits) > 0 and clips[0].location is not None:
        return (
            f"gets a different limit there: {_format_by_rank(limits)}",
            "Clip to the same limit on every rank: all_reduce the values that it is computed from before the call.",
        )
    return None


def _format_by_rank(values: Sequence[float]) -> str:
    return "; ".join(group_by_value([format_norm(value) for value in values]))


def judge_separate_meshes(
    ranks: Sequence[Sequence[int]], by_step: Mapping[int, Sequence[Sequence[ReplicaCaptured]]], line: Location | None
) -> list[Finding]:
    """DDP301: parameters that diverge between separate meshes (`ranks` and `by_step`: grouped by mesh)."""
    if len(by_step) < 2 or _shards_that_differ(by_step[min(by_step)]):
        return []
    differing = _shards_that_differ(by_step[max(by_step)])
    first = by_step[min(by_step)][0][0].state.values.parameters
    if differing < first.keys() or not differing:
        return []
    groups = join_names([format_ranks(mesh) for mesh in ranks])
    return new_finding(
        "DDP301",
        ("mesh",),
        f"{capitalized(groups)} have separate meshes: they begin with the same model and diverge, because "
        "nothing averages gradients between them.",
        severity=Severity.WARNING,
        location=line,
        evidence=[f"all parameters were equal before step {min(by_step)}, and different before step {max(by_step)}"],
        fix="Give fully_shard a mesh of all ranks: of one dimension, or of two, the first of which replicates "
        '(init_device_mesh(..., mesh_dim_names=("replicate", "shard"))).',
        tags=(UNEQUAL,),
    )


def _shards_that_differ(groups: Sequence[Sequence[ReplicaCaptured]]) -> set[str]:
    """Return the parameters with mismatched values in the same shard of different groups."""
    by_shard = group_by(chain.from_iterable(groups), lambda replica: replica.shard).values()
    values = ([replica.state.values.parameters for replica in replicas] for replicas in by_shard)
    return set(chain.from_iterable(map(differing_names, values)))


def judge_hand_split(wrappers: Sequence[WrapperTrace], world_size: int) -> list[Finding]:
    """DDP301: parameters with equal initial values but unequal gradients within a split model.

    A finding requires that other parameters have unequal initial values: the model is split over the ranks. Parameters
    with constant initial values are ignored, because split parameters may have the same constants.
    """
    number, ranks = wrappers[0].number, {rank.started.rank: rank for wrapper in wrappers for rank in wrapper.ranks}
    groups = hand_split(wrappers, world_size)
    names_by_group = {
        members: _unaveraged_replicated([_averaged_captures(ranks[n], number) for n in members]) for members in groups
    }
    names = next(filter(None, names_by_group.values()), [])
    if not names:
        return []
    diverged_models = [members for members, diverged in names_by_group.items() if diverged]
    line = groups[diverged_models[0]]
    return new_finding(
        "DDP301",
        names,
        f"{join_names(names)} {plural_verb('begins', 'begin', names)} with the same values on "
        f"{format_ranks(diverged_models[0])}, which compute one model together, and "
        f"{plural_verb('gets', 'get', names)} a different gradient on each: that of a part of the model.",
        ranks=tuple(sorted(itertools.chain(*diverged_models))),
        location=line,
        evidence=["the ranks combine the outputs of their parts there, by a collective in a custom autograd Function"],
        fix="In the backward pass, all_reduce over these ranks the gradient of the input of the split layers: a "
        "function that returns its input in forward (Megatron-LM's copy_to_tensor_model_parallel_region). If these are "
        "parts that only start equal, use a different seed for them on each rank.",
    )


def _averaged_captures(rank: RankTrace, wrapper: int) -> dict[int, ReplicaCaptured]:
    return {item.step: item for item in entries_of(rank, ReplicaCaptured) if item.wrapper == wrapper and item.averaged}


def _unaveraged_replicated(captured: Sequence[Mapping[int, ReplicaCaptured]]) -> list[str]:
    """Return never averaged parameters that are equal on ranks in the first step only."""
    steps = aligned(captured)
    if len(steps) < MIN_SPLIT_STEPS:
        return []
    first, *later = steps

    def is_equal(replicas: Sequence[ReplicaCaptured], name: str) -> bool:
        return len({replica.state.values.parameters.get(name) for replica in replicas}) == 1

    def may_be_averaged(replicas: Sequence[ReplicaCaptured], name: str) -> bool:
        sketches = [replica.averaged.get(name, ()) for replica in replicas]
        return not all(sketches) or are_near(sketches)

    names = [name for name in first[0].parts if all(name in replica.parts for replica in first)]
    equal = [name for name in names if is_equal(first, name)]
    differ = [name for name in equal if not any(is_equal(step, name) for step in later)]
    averaged = {name for name in differ if any(may_be_averaged(step, name) for step in (first, *later))}
    return [name for name in differ if name not in averaged] if len(equal) < len(names) else []


def judge_gradients(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP301: gradients of replicated parameters that differ between ranks of a split model."""
    mismatches = [(rank_steps, names) for rank_steps in steps if (names := _names_that_differ(rank_steps))]
    if not mismatches or 2 * len(mismatches) <= len(steps):
        return []
    rank_steps, names = mismatches[0]
    draws_differ = _generators_differ(steps)
    seeded = next((step.seeded_at for step in rank_steps if step.seeded_at is not None), None) if draws_differ else None
    message = (
        f"The {plural_verb('gradient', 'gradients', names)} of {join_names(names)} "
        f"{plural_verb('differs', 'differ', names)} between {format_ranks(ranks)}, which compute one model together "
        f"(tensor parallelism) and replicate {plural_verb('it', 'them', names)}: "
    )
    return new_finding(
        "DDP301",
        names,
        message
        + (
            "each rank draws different random numbers."
            if draws_differ
            else "each has the gradient of its part, and nothing adds them up."
        ),
        ranks=ranks,
        steps=(rank_steps[0].count,),
        location=seeded or split.location or rank_steps[0].location,
        evidence=[
            "the state of torch's generator differs between these ranks before each step, and each step draws from it"
            if draws_differ
            else "such as its own part of the sequence, if replicated layers work on a part"
        ],
        related={"optimizer steps": rank_steps[0].location},
        fix="Seed ranks that compute one model together equally (by their place in the data dimension of the mesh): "
        "dropout and similar layers have to give all of them the same result."
        if draws_differ
        else NAME_IN_PLAN,
    )


def _names_that_differ(rank_steps: PartSteps) -> list[str]:
    gradients = [step.gradients for step in rank_steps]
    return [name for name, sketches in common_values(gradients).items() if not are_near(sketches)]


def _generators_differ(steps: Sequence[PartSteps]) -> bool:
    """Return True if generator states differ between ranks and advance in every step."""
    states = list(zip(*([step.random for step in rank_steps] for rank_steps in steps), strict=True))
    moves = all(before != after for by_step in states for before, after in itertools.pairwise(by_step[:MIN_PART_STEPS]))
    return moves and all(len({step.random for step in rank_steps}) > 1 for rank_steps in steps)


def judge_meshes(wrappers: Sequence[WrapperTrace], world_size: int) -> list[Finding]:
    """DDP301: groups of ranks that shard the same model on separate meshes and diverge.

    The finding is a warning: some scripts train several models from equal initial weights on purpose. Ranks that send
    tensors to each other are skipped as pipeline stages. `wrappers`: the wrappers of one model, one per group of ranks.
    """
    ranks = [wrapper.made.ranks for wrapper in wrappers]
    is_pipeline = any(entries_of(rank, PeerReceived) for wrapper in wrappers for rank in wrapper.ranks)
    if is_pipeline or len(wrappers) < 2 or sum(map(len, ranks)) < world_size:
        return []
    if any(wrapper.made.context.sharded is None or wrapper.missing for wrapper in wrappers):
        return []
    steps = common_values([wrapper.compared for wrapper in wrappers])
    sharded = {step: groups for step, groups in steps.items() if all(r.shard >= 0 for r in chain(*groups))}
    return judge_separate_meshes(ranks, sharded, wrappers[0].made.location)


def judge_variant_gradients(gradients: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP301: gradients of a compiled or micro-batch step that differ between ranks."""
    names = differing_names(gradients)
    return new_finding("DDP301", sorted(names), "the gradients differ between ranks") if names else []


relocate = partial(locate_reduction, ("hook",))
