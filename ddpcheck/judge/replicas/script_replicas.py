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


def without_rounding(replicas: Sequence[ReplicaCaptured]) -> Sequence[ReplicaCaptured]:
    """Give parameters that differ between ranks by rounding only the same fingerprint.

    For example, SAM moves parameters by a rank-local `e` and back before the optimizer's step, and `p + e - e` is not
    exactly `p`. Rounding accumulates over the steps like a random walk.
    """
    growth = _ROUNDINGS * math.sqrt(replicas[0].step + 1)
    rounded = {}
    for name in differing_names([replica.state.values.parameters for replica in replicas]):
        values = [replica.values[name] for replica in replicas if name in replica.values]
        if len(values) == len(replicas):
            tolerance = growth * max(replica.eps.get(name, _EPS) for replica in replicas)
            if relative(max(math.dist(values[0], sketch) for sketch in values), math.hypot(*values[0])) <= tolerance:
                rounded[name] = replicas[0].state.values.parameters[name]
    return _with_values(replicas, lambda values: replace(values, parameters={**values.parameters, **rounded}))


def without_alike_later(
    replicas: Sequence[ReplicaCaptured], later: Sequence[Mapping[str, int]]
) -> Sequence[ReplicaCaptured]:
    """Drop buffers that differ in a step but are equal before the next step.

    `later`: buffers at the start of the next step, by rank; nothing is dropped if unknown on some rank.
    """
    if len(later) < len(replicas):
        return replicas
    equal = later[0].keys() - differing_names(later).keys()
    return _with_values(
        replicas, lambda values: replace(values, buffers={n: v for n, v in values.buffers.items() if n not in equal})
    )


def _with_values(
    replicas: Sequence[ReplicaCaptured], change: Callable[[DdpStepEvidence], DdpStepEvidence]
) -> list[ReplicaCaptured]:
    return [replace(replica, state=replace(replica.state, values=change(replica.state.values))) for replica in replicas]


def judge_captured(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge a step captured on all ranks (`first`: the first captured step)."""
    if replicas[0].shard >= 0:
        return _judge_shards(entry, step, replicas, first=first)
    if len({frozenset(replica.eps) for replica in replicas}) > 1:  # only some ranks have compiled the module
        replicas = [*map(_as_written, replicas)]
    states = [replica.state for replica in replicas]
    differences = _differences(replicas)
    all_equal = len({repr(replace(state, values=replace(state.values, rank=0))) for state in states}) == 1
    if all_equal and not any(difference.bad for rank_diffs in differences for difference in rank_diffs):
        return []
    states = [
        replace(state, values=replace(state.values, against_local=tuple(rank_diffs)))
        for state, rank_diffs in zip(states, differences, strict=True)
    ]
    hook = next((replica for replica in replicas if replica.own_hook), replicas[0])
    wrapper = replace(entry.context.wrapper, comm_hook=hook.hook)
    context = replace(entry.context, wrapper=wrapper, own_hook=hook.own_hook)
    findings = judge_replica_states(states, context, step, after_backward=True, first=first)
    return [finding if first or finding.code != "DDP222" else replace(finding, steps=(step,)) for finding in findings]


def _as_written(replica: ReplicaCaptured) -> ReplicaCaptured:
    """Rename captured tensors to uncompiled names (`_orig_mod` removed)."""

    def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {plain_name(name): value for name, value in values.items()}

    values = replica.state.values
    by_name: dict[str, Any] = {field: named(getattr(values, field)) for field in ("parameters", "gradients", "buffers")}
    fields: dict[str, Any] = {field: named(getattr(replica, field)) for field in ("own", "averaged", "eps", "values")}
    return replace(replica, state=replace(replica.state, values=replace(values, **by_name)), **fields)


def _judge_shards(entry: WrapperMade, step: int, replicas: Sequence[ReplicaCaptured], *, first: bool) -> list[Finding]:
    """Judge `fully_shard`: state common to all ranks, reduced gradients, replicated shards."""
    whole = [
        replace(
            replica,
            shard=-1,
            own={},
            state=replace(replica.state, values=replace(replica.state.values, gradients={}, parameters={})),
        )
        for replica in replicas
    ]
    findings = judge_captured(entry, step, whole, first=first)
    values = [
        DdpStepEvidence(replica.state.values.rank, step, against_local=tuple(against))
        for replica, against in zip(replicas, against_average(replicas), strict=True)
    ]
    if any(difference.bad for value in values for difference in value.against_local):
        states = [ReplicaState(ModuleDescription(), value) for value in values]
        findings += judge_replica_states(states, entry.context, step, after_backward=True, first=first)
    findings += judge_repeated(replicas)
    by_code: dict[str, Finding] = {}
    for group in group_by(replicas, lambda replica: replica.shard).values():
        bare = [
            replace(
                rep, shard=-1, own={}, state=ReplicaState(ModuleDescription(), replace(rep.state.values, buffers={}))
            )
            for rep in group
        ]
        ranks = [replica.state.values.rank for replica in bare]  # finding.ranks are indices into this list
        for finding in judge_captured(entry, step, bare, first=first) if len(bare) > 1 else []:
            previous = by_code.get(finding.code)
            most = finding if previous is None or len(previous.subjects) < len(finding.subjects) else previous
            finding_ranks = {ranks[index] for index in finding.ranks} | set(() if previous is None else previous.ranks)
            fix = finding.fix
            if finding.code == "DDP208":
                fix = "fully_shard broadcasts nothing: give all replicas the same values before it, or hand rank 0's "
                fix += "values out after it (set_model_state_dict with broadcast_from_rank0)."
            by_code[finding.code] = replace(most, ranks=tuple(sorted(finding_ranks)), evidence=(), fix=fix)
    return [*findings, *by_code.values()]


def against_average(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far reduced gradients are from the ranks' average."""
    if replicas[0].shard < 0:
        return _differences(replicas)
    return [
        _differences(
            [  # other ranks' reduced gradients belong to other shards
                replace(peer, own=_own_of(peer, replica.shard), averaged=replica.averaged if peer is replica else {})
                for peer in replicas
            ]
        )[index]
        for index, replica in enumerate(replicas)
    ]


def _own_of(replica: ReplicaCaptured, shard: int) -> dict[str, Sketch]:
    """Return sketches of a rank's own gradients that are reduced onto `shard`."""
    parts = ((*name.partition("/"), numbers) for name, numbers in replica.own.items())
    return {name: numbers for number, _, name, numbers in parts if number == str(shard)}


def _differences(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return by rank how far sketches of averaged gradients are from the average."""
    names = list(dict.fromkeys(name for replica in replicas for name in replica.own))
    owns = {name: [replica.own[name] for replica in replicas if name in replica.own] for name in names}
    scales = {name: math.hypot(*chain.from_iterable(owns[name])) / math.sqrt(len(replicas)) for name in names}
    wanted = {name: [sum(numbers) / len(replicas) for numbers in zip(*owns[name], strict=True)] for name in names}
    diffs: list[list[Difference]] = []
    for replica in replicas:
        cached = (
            rank_diffs
            for peer, rank_diffs in zip(replicas, diffs, strict=False)
            if (peer.averaged, peer.eps, peer.hook) == (replica.averaged, replica.eps, replica.hook)
        )
        rank_diffs = next(cached, None)
        diffs.append(_differences_of(replica, wanted, scales, len(replicas)) if rank_diffs is None else rank_diffs)
    return diffs


def _differences_of(
    replica: ReplicaCaptured, wanted: Mapping[str, Sequence[float]], scales: Mapping[str, float], world_size: int
) -> list[Difference]:
    differences = []
    for name, want in wanted.items():
        scale = scales[name]
        if replica.hook:  # hooks may round away near-zero gradients, e.g. of a bias before BatchNorm
            scale = max(value for n, value in scales.items() if n.rpartition(".")[0] == name.rpartition(".")[0])
        got = replica.averaged.get(name) or [0.0] * len(want)
        if not all(map(math.isfinite, (*want, *got))):
            return []  # overflow: a gradient scaler skips the step
        tolerance = max(_TOLERANCE, (8 + world_size) * replica.eps.get(name, 0.0))
        delta, norm = math.dist(got, want), math.hypot(*want)
        ratio = sum(map(mul, got, want)) / power if (power := norm * norm) else 0.0
        residual = math.dist(got, [ratio * number for number in want])
        differences.append(
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
    return differences
