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


def hand_split(same: Sequence[WatchedWrapper], world_size: int) -> dict[tuple[int, ...], Location]:
    """Map each group of ranks of one model to the line of its collective."""
    made, place = same[0].made, {n: place for place, one in enumerate(same) for n in one.made.ranks}
    ranks = {rank.started.rank: rank for one in same for rank in one.ranks}
    alike = all(
        one.made.context.sharded is None
        and (one.made.module, one.made.context.trainable) == (made.module, made.context.trainable)
        for one in same
    )
    if len(same) < 2 or not alike or len(ranks) < world_size:
        return {}
    used = [one for rank in ranks.values() for one in entries_of(rank, GroupUsed)]
    lines = {one.members: one.differentiated_at for one in used if one.differentiated_at is not None}
    across = {
        members: line
        for members, line in lines.items()
        if 1 < len(members) == len({place.get(n) for n in members})
        and _given_alike([ranks[n] for n in members], same[0].number)
    }
    return across if sorted(itertools.chain(*across)) == sorted(ranks) else {}


def parts_in_recipe(local: Sequence[LocalStep], parameters: Sequence[Mapping[str, int]]) -> list[tuple[int, ...]]:
    """Return groups of ranks of one model, if a recipe's `model` splits layers.

    Such ranks have the same samples, different parameters, and a common collective in an autograd function.
    """
    together = {call.members for item in local for call in item.forward_calls if call.differentiable}
    found = [
        ranks
        for ranks in sorted(together)
        if len({local[rank].sample_fingerprints for rank in ranks}) == 1
        and differing_names([parameters[rank] for rank in ranks])
    ]
    return found if sorted(itertools.chain(*found)) == [*range(len(local))] else []


def _given_alike(ranks: Sequence[WatchedRank], wrapper: int) -> bool:
    given = [[one.samples for one in entries_of(rank, Inputs) if one.wrapper == wrapper] for rank in ranks]
    return min(map(len, given)) >= _FEWEST_INPUTS and all(of_rank == given[0] for of_rank in given)


def compare_hand_split(facts: ScriptFacts) -> Verdicts:
    """Judge the hand-split layers of all wrappers."""
    by_number = group_by(facts.wrappers, lambda one: one.number)
    split = [same for same in by_number.values() if not facts.model_groups and hand_split(same, facts.world_size)]
    found = [finding for same in split for finding in judge_hand_split(same, facts.world_size)]
    what = "no fault in parameters that start equal on ranks that compute one model together"
    return {"replicas": Verdict(found, what if split else "")}


def judge_hand_split(same: Sequence[WatchedWrapper], world_size: int) -> list[Finding]:
    """DDP301: parameters that start equal on ranks of one model but get different gradients.

    Reported only if other parameters, the split parts, start different. Constant initial values are ignored: split
    parts may start constant, too.
    """
    number, ranks = same[0].number, {rank.started.rank: rank for one in same for rank in one.ranks}
    groups = hand_split(same, world_size)
    found = {members: _apart([_captured(ranks[n], number) for n in members]) for members in groups}
    names = next(filter(None, found.values()), [])
    if not names:
        return []
    of_models = [members for members, apart in found.items() if apart]
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
    return {one.step: one for one in entries_of(rank, ReplicaCaptured) if one.wrapper == wrapper and one.averaged}


def _apart(captured: Sequence[Mapping[int, ReplicaCaptured]]) -> list[str]:
    """Return parameters that start equal on ranks of one model, then always differ."""
    steps = sorted(set(captured[0]).intersection(*captured))
    if len(steps) < _FEWEST_STEPS:
        return []
    first, *later = [[of_rank[step] for of_rank in captured] for step in steps]

    def is_one(everyone: Sequence[ReplicaCaptured], name: str) -> bool:
        return len({one.state.values.parameters.get(name) for one in everyone}) == 1

    def near(everyone: Sequence[ReplicaCaptured], name: str) -> bool:
        sketches = [one.averaged[name] for one in everyone if name in one.averaged]
        return len(sketches) < len(everyone) or are_near(sketches)

    known = [name for name in first[0].parts if all(name in one.parts for one in first)]
    alike = [name for name in known if is_one(first, name)]
    if len(alike) == len(known):
        return []
    return [
        name
        for name in alike
        if not any(is_one(everyone, name) for everyone in later) and not any(near(one, name) for one in (first, *later))
    ]
