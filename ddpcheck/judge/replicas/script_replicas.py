"""Captured replicas of a script's ranks: values, gradients and replicated shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import mul
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import Difference, relative
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, plain_name
from ddpcheck.judge.loop.watched_steps import judge_replica_states
from ddpcheck.judge.replicas.descriptions import differing_names
from ddpcheck.judge.replicas.replica_state import judge_repeated
from ddpcheck.stream.entries import ReplicaCaptured, Sketch, WrapperMade
from ddpcheck.stream.rank_report import ReplicaState

_Value = TypeVar("_Value")

_ROUNDINGS = 16  # in units of machine epsilon: rounding of two sums per step, and of a sketch
_EPS = 2.0**-23  # of float32
_TOLERANCE = 1e-3  # relative error of a float32 sketch, from sums of many elements


def without_rounding(everyone: Sequence[ReplicaCaptured]) -> Sequence[ReplicaCaptured]:
    """Give parameters that differ between ranks by rounding only the same fingerprint.

    For example, SAM moves parameters by a rank-local `e` and back before the optimizer's step, and `p + e - e` is not
    exactly `p`. Rounding accumulates over the steps like a random walk.
    """
    growth = _ROUNDINGS * math.sqrt(everyone[0].step + 1)
    rounded = {}
    for name in differing_names([one.state.values.parameters for one in everyone]):
        values = [one.values[name] for one in everyone if name in one.values]
        if len(values) == len(everyone):
            tolerance = growth * max(one.eps.get(name, _EPS) for one in everyone)
            if relative(max(math.dist(values[0], other) for other in values), math.hypot(*values[0])) <= tolerance:
                rounded[name] = everyone[0].state.values.parameters[name]
    return _with_values(everyone, lambda values: replace(values, parameters={**values.parameters, **rounded}))


def without_alike_later(
    everyone: Sequence[ReplicaCaptured], later: Sequence[Mapping[str, int]]
) -> Sequence[ReplicaCaptured]:
    """Drop buffers that differ in a step but are equal before the next step.

    `later`: buffers at the start of the next step, by rank; nothing is dropped if unknown on some rank.
    """
    if len(later) < len(everyone):
        return everyone
    alike = later[0].keys() - differing_names(later).keys()
    return _with_values(
        everyone, lambda values: replace(values, buffers={n: v for n, v in values.buffers.items() if n not in alike})
    )


def _with_values(
    everyone: Sequence[ReplicaCaptured], change: Callable[[DdpStepEvidence], DdpStepEvidence]
) -> list[ReplicaCaptured]:
    return [replace(one, state=replace(one.state, values=change(one.state.values))) for one in everyone]


def judge_captured(made: WrapperMade, step: int, everyone: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge a step captured on all ranks (`first`: the first captured step)."""
    if everyone[0].shard >= 0:
        return _judge_shards(made, step, everyone, first=first)
    if len({frozenset(one.eps) for one in everyone}) > 1:  # only some ranks have compiled the module
        everyone = [*map(_as_written, everyone)]
    states = [one.state for one in everyone]
    differences = _differences(everyone)
    alike = len({repr(replace(state, values=replace(state.values, rank=0))) for state in states}) == 1
    if alike and not any(difference.bad for theirs in differences for difference in theirs):
        return []
    states = [
        replace(state, values=replace(state.values, against_local=tuple(theirs)))
        for state, theirs in zip(states, differences, strict=True)
    ]
    hook = next((one for one in everyone if one.own_hook), everyone[0])
    wrapper = replace(made.context.wrapper, comm_hook=hook.hook)
    context = replace(made.context, wrapper=wrapper, own_hook=hook.own_hook)
    found = judge_replica_states(states, context, step, after_backward=True, first=first)
    return [one if first or one.code != "DDP222" else replace(one, steps=(step,)) for one in found]


def _as_written(one: ReplicaCaptured) -> ReplicaCaptured:
    """Rename captured tensors to uncompiled names (`_orig_mod` removed)."""

    def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {plain_name(name): value for name, value in values.items()}

    values = one.state.values
    by_name: dict[str, Any] = {field: named(getattr(values, field)) for field in ("parameters", "gradients", "buffers")}
    of_rank: dict[str, Any] = {field: named(getattr(one, field)) for field in ("own", "averaged", "eps", "values")}
    return replace(one, state=replace(one.state, values=replace(values, **by_name)), **of_rank)


def _judge_shards(made: WrapperMade, step: int, everyone: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge `fully_shard`: state common to all ranks, reduced gradients, replicated shards."""
    whole = [
        replace(
            one,
            shard=-1,
            own={},
            state=replace(one.state, values=replace(one.state.values, gradients={}, parameters={})),
        )
        for one in everyone
    ]
    found = judge_captured(made, step, whole, first=first)
    values = [
        DdpStepEvidence(one.state.values.rank, step, against_local=tuple(against))
        for one, against in zip(everyone, against_average(everyone), strict=True)
    ]
    if any(difference.bad for value in values for difference in value.against_local):
        states = [ReplicaState(ModuleDescription(), value) for value in values]
        found += judge_replica_states(states, made.context, step, after_backward=True, first=first)
    found += judge_repeated(everyone)
    apart: dict[str, Finding] = {}
    for replicas in group_by(everyone, lambda one: one.shard).values():
        theirs = [
            replace(
                one, shard=-1, own={}, state=ReplicaState(ModuleDescription(), replace(one.state.values, buffers={}))
            )
            for one in replicas
        ]
        ranks = [one.state.values.rank for one in theirs]  # finding.ranks are indices into this list
        for finding in judge_captured(made, step, theirs, first=first) if len(theirs) > 1 else []:
            known = apart.get(finding.code)
            most = finding if known is None or len(known.subjects) < len(finding.subjects) else known
            places = {ranks[place] for place in finding.ranks} | set(() if known is None else known.ranks)
            fix = finding.fix
            if finding.code == "DDP208":
                fix = "fully_shard broadcasts nothing: give all replicas the same values before it, or hand rank 0's "
                fix += "values out after it (set_model_state_dict with broadcast_from_rank0)."
            apart[finding.code] = replace(most, ranks=tuple(sorted(places)), evidence=(), fix=fix)
    return [*found, *apart.values()]


def against_average(everyone: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far reduced gradients are from the ranks' average."""
    if everyone[0].shard < 0:
        return _differences(everyone)
    return [
        _differences(
            [  # other ranks' reduced gradients belong to other shards
                replace(other, own=_own_of(other, one.shard), averaged=one.averaged if other is one else {})
                for other in everyone
            ]
        )[place]
        for place, one in enumerate(everyone)
    ]


def _own_of(one: ReplicaCaptured, shard: int) -> dict[str, Sketch]:
    """Return sketches of a rank's own gradients that are reduced onto `shard`."""
    parts = ((*name.partition("/"), numbers) for name, numbers in one.own.items())
    return {name: numbers for number, _, name, numbers in parts if number == str(shard)}


def _differences(everyone: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far sketches of averaged gradients are from the average."""
    names = list(dict.fromkeys(name for one in everyone for name in one.own))
    owns = {name: [one.own[name] for one in everyone if name in one.own] for name in names}
    scales = {name: math.hypot(*chain.from_iterable(owns[name])) / math.sqrt(len(everyone)) for name in names}
    wanted = {name: [sum(numbers) / len(everyone) for numbers in zip(*owns[name], strict=True)] for name in names}
    found: list[list[Difference]] = []
    for one in everyone:
        same = (
            theirs
            for other, theirs in zip(everyone, found, strict=False)
            if (other.averaged, other.eps, other.hook) == (one.averaged, one.eps, one.hook)
        )
        theirs = next(same, None)
        found.append(_differences_of(one, wanted, scales, len(everyone)) if theirs is None else theirs)
    return found


def _differences_of(
    one: ReplicaCaptured, wanted: Mapping[str, Sequence[float]], scales: Mapping[str, float], world_size: int
) -> list[Difference]:
    found = []
    for name, want in wanted.items():
        scale = scales[name]
        if one.hook:  # hooks may round away near-zero gradients, e.g. of a bias before BatchNorm
            scale = max(value for n, value in scales.items() if n.rpartition(".")[0] == name.rpartition(".")[0])
        got = one.averaged.get(name) or [0.0] * len(want)
        if not all(map(math.isfinite, (*want, *got))):
            return []  # overflow: a gradient scaler skips the step
        tolerance = max(_TOLERANCE, (8 + world_size) * one.eps.get(name, 0.0))
        delta, norm = math.dist(got, want), math.hypot(*want)
        ratio = sum(map(mul, got, want)) / power if (power := norm * norm) else 0.0
        residual = math.dist(got, [ratio * number for number in want])
        found.append(
            Difference(
                name,
                relative(delta, scale),
                tolerance,
                ratio=ratio,
                residual=relative(residual, scale),
                elements=len(want),
                absolute_error=delta,
                reference_norm=norm,
            )
        )
    return found
