"""DDP301: replicated parameters of models that a script splits over ranks without DTensor.

DDP averages over the groups of ranks with the same part. Ranks that compute one model are detected by collectives
inside autograd functions across these groups, over ranks with the same inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by, join_names, one_finding, plural_verb
from ddpcheck.judge.gradients.script_alone import are_near
from ddpcheck.judge.replicas.descriptions import differing_names
from ddpcheck.judge.script_facts import ScriptFacts, WatchedWrapper, entries_of
from ddpcheck.judge.verdict import Verdict, Verdicts
from ddpcheck.stream.entries import GroupUsed, ReplicaCaptured
from ddpcheck.stream.rank_log import WatchedRank

_FEWEST_INPUTS = 2
_FEWEST_STEPS = 3


def hand_split(wrappers: Sequence[WatchedWrapper], world_size: int) -> dict[tuple[int, ...], Location]:
    """Map each group of ranks of one model to the line of its collective."""
    first, indices = wrappers[0].made, {n: index for index, wrapper in enumerate(wrappers) for n in wrapper.made.ranks}
    ranks = {rank.started.rank: rank for wrapper in wrappers for rank in wrapper.ranks}
    alike = all(
        wrapper.made.context.sharded is None
        and (wrapper.made.module, wrapper.made.context.trainable) == (first.module, first.context.trainable)
        for wrapper in wrappers
    )
    if len(wrappers) < 2 or not alike or len(ranks) < world_size:
        return {}
    used = [use for rank in ranks.values() for use in entries_of(rank, GroupUsed)]
    lines = {use.members: use.differentiated_at for use in used if use.differentiated_at is not None}
    across = {
        members: line
        for members, line in lines.items()
        if 1 < len(members) == len({indices.get(n) for n in members})
        and _given_alike([ranks[n] for n in members], wrappers[0].number)
    }
    return across if sorted(itertools.chain(*across)) == sorted(ranks) else {}


def parts_in_recipe(local: Sequence[LocalStep], parameters: Sequence[Mapping[str, int]]) -> list[tuple[int, ...]]:
    """Return groups of ranks of one model, if a recipe's `model` splits layers.

    Such ranks have the same samples, different parameters, and a common collective in an autograd function.
    """
    groups = {call.members for item in local for call in item.forward_calls if call.differentiable}
    models = [
        ranks
        for ranks in sorted(groups)
        if len({local[rank].sample_fingerprints for rank in ranks}) == 1
        and differing_names([parameters[rank] for rank in ranks])
    ]
    return models if sorted(itertools.chain(*models)) == [*range(len(local))] else []


def _given_alike(ranks: Sequence[WatchedRank], wrapper: int) -> bool:
    samples = [[inputs.samples for inputs in entries_of(rank, Inputs) if inputs.wrapper == wrapper] for rank in ranks]
    return min(map(len, samples)) >= _FEWEST_INPUTS and all(rank_samples == samples[0] for rank_samples in samples)


def compare_hand_split(facts: ScriptFacts) -> Verdicts:
    """Judge the hand-split layers of all wrappers."""
    by_number = group_by(facts.wrappers, lambda wrapper: wrapper.number)
    split = [group for group in by_number.values() if not facts.model_groups and hand_split(group, facts.world_size)]
    findings = [finding for group in split for finding in judge_hand_split(group, facts.world_size)]
    message = "no fault in parameters that start equal on ranks that compute one model together"
    return {"replicas": Verdict(findings, message if split else "")}


def judge_hand_split(wrappers: Sequence[WatchedWrapper], world_size: int) -> list[Finding]:
    """DDP301: parameters that start equal on ranks of one model but get different gradients.

    Reported only if other parameters, the split parts, start different. Constant initial values are ignored: split
    parts may start constant, too.
    """
    number, ranks = wrappers[0].number, {rank.started.rank: rank for wrapper in wrappers for rank in wrapper.ranks}
    groups = hand_split(wrappers, world_size)
    names_by_group = {members: _apart([_captured(ranks[n], number) for n in members]) for members in groups}
    names = next(filter(None, names_by_group.values()), [])
    if not names:
        return []
    of_models = [members for members, diverged in names_by_group.items() if diverged]
    line = groups[of_models[0]]
    return one_finding(
        "DDP301",
        names,
        f"{join_names(names)} {plural_verb('begins', 'begin', names)} with the same values on "
        f"{format_ranks(of_models[0])}, which compute one model together, and {plural_verb('gets', 'get', names)} a "
        "different gradient on each: that of a part of the model.",
        ranks=tuple(sorted(itertools.chain(*of_models))),
        location=line,
        evidence=["the ranks combine the outputs of their parts there, by a collective in a custom autograd Function"],
        fix="In the backward pass, all_reduce over these ranks the gradient of the input of the split layers: a "
        "function that returns its input in forward (Megatron-LM's copy_to_tensor_model_parallel_region). If these are "
        "parts that only start equal, use a different seed for them on each rank.",
    )


def _captured(rank: WatchedRank, wrapper: int) -> dict[int, ReplicaCaptured]:
    return {item.step: item for item in entries_of(rank, ReplicaCaptured) if item.wrapper == wrapper and item.averaged}


def _apart(captured: Sequence[Mapping[int, ReplicaCaptured]]) -> list[str]:
    """Return parameters that start equal on ranks of one model, then always differ."""
    steps = sorted(set(captured[0]).intersection(*captured))
    if len(steps) < _FEWEST_STEPS:
        return []
    first, *later = [[by_step[step] for by_step in captured] for step in steps]

    def is_one(replicas: Sequence[ReplicaCaptured], name: str) -> bool:
        return len({replica.state.values.parameters.get(name) for replica in replicas}) == 1

    def near(replicas: Sequence[ReplicaCaptured], name: str) -> bool:
        sketches = [replica.averaged[name] for replica in replicas if name in replica.averaged]
        return len(sketches) < len(replicas) or are_near(sketches)

    names = [name for name in first[0].parts if all(name in replica.parts for replica in first)]
    equal = [name for name in names if is_one(first, name)]
    if len(equal) == len(names):
        return []
    return [
        name
        for name in equal
        if not any(is_one(step, name) for step in later) and not any(near(step, name) for step in (first, *later))
    ]
