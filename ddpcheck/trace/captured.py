"""Values of replicas captured in a step, and sketches of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import mul
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import Difference, relative
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import plain_name
from ddpcheck.stream.entries import ReplicaCaptured, Sketch
from ddpcheck.stream.rank_report import WatchContext
from ddpcheck.trace.replicas import differing_names

_Value = TypeVar("_Value")


def may_average_by_hand(values: Sequence[DdpStepEvidence], context: WatchContext, step: int) -> bool:
    """Return True if the script may average gradients that its comm hook left unequal.

    The evidence is equal parameters on all ranks. In step 0, equality shows nothing, and no evidence is needed.
    """
    if not (context.wrapper.comm_hook and differing_names([item.gradients for item in values])):
        return False
    parameters = [item.parameters for item in values if item.parameters]
    return not step or (len(parameters) == len(values) and not differing_names(parameters))


_ROUNDING_UNITS = 16  # in units of machine epsilon: rounding of two sums per step, and of a sketch
_EPS = 2.0**-23  # of float32
_TOLERANCE = 1e-3  # relative error of a float32 sketch, from sums of many elements


def without_rounding(replicas: Sequence[ReplicaCaptured]) -> Sequence[ReplicaCaptured]:
    """Give parameters that differ only by rounding equal fingerprints; return the changed replicas.

    For example, SAM moves parameters by a rank-local `e` and back before the optimizer's step, and `p + e - e` is not
    exactly `p`. Rounding accumulates over the steps like a random walk.
    """
    growth = _ROUNDING_UNITS * math.sqrt(replicas[0].step + 1)
    rounded = {}
    for name in differing_names([replica.state.values.parameters for replica in replicas]):
        values = [replica.values[name] for replica in replicas if name in replica.values]
        if len(values) == len(replicas):
            tolerance = growth * max(replica.eps.get(name, _EPS) for replica in replicas)
            if relative(max(math.dist(values[0], sketch) for sketch in values), math.hypot(*values[0])) <= tolerance:
                rounded[name] = replicas[0].state.values.parameters[name]
    return with_values(replicas, lambda values: replace(values, parameters={**values.parameters, **rounded}))


def without_later_equal(
    replicas: Sequence[ReplicaCaptured], later: Sequence[Mapping[str, int]]
) -> Sequence[ReplicaCaptured]:
    """Drop buffers that are equal on all ranks when the next step starts.

    `later`: fingerprints of buffers at the start of the next step, by rank; if a rank is missing, no buffer is dropped.
    """
    if len(later) < len(replicas):
        return replicas
    equal = later[0].keys() - differing_names(later).keys()
    return with_values(
        replicas, lambda values: replace(values, buffers={n: v for n, v in values.buffers.items() if n not in equal})
    )


def with_values(
    replicas: Sequence[ReplicaCaptured], change: Callable[[DdpStepEvidence], DdpStepEvidence]
) -> list[ReplicaCaptured]:
    return [replace(replica, state=replace(replica.state, values=change(replica.state.values))) for replica in replicas]


def without_prefixes(replica: ReplicaCaptured) -> ReplicaCaptured:
    """Remove `_orig_mod`, which torch.compile adds, from the names of captured tensors."""

    def named(values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {plain_name(name): value for name, value in values.items()}

    values = replica.state.values
    by_name: dict[str, Any] = {field: named(getattr(values, field)) for field in ("parameters", "gradients", "buffers")}
    fields: dict[str, Any] = {field: named(getattr(replica, field)) for field in ("own", "averaged", "eps", "values")}
    return replace(replica, state=replace(replica.state, values=replace(values, **by_name)), **fields)


def compare_with_average(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return, by rank, differences of reduced gradients, sharded or whole, from averaged local gradients."""
    if replicas[0].shard < 0:
        return unsharded_differences(replicas)
    return [
        unsharded_differences(
            [  # other ranks' reduced gradients belong to other shards
                replace(
                    peer, own=_local_grads_of(peer, replica.shard), averaged=replica.averaged if peer is replica else {}
                )
                for peer in replicas
            ]
        )[index]
        for index, replica in enumerate(replicas)
    ]


def _local_grads_of(replica: ReplicaCaptured, shard: int) -> dict[str, Sketch]:
    parts = ((*name.partition("/"), numbers) for name, numbers in replica.own.items())
    return {name: numbers for number, _, name, numbers in parts if number == str(shard)}


def unsharded_differences(replicas: Sequence[ReplicaCaptured]) -> list[list[Difference]]:
    """Return, by rank, differences of unsharded reduced gradients from averaged local gradients."""
    names = list(dict.fromkeys(name for replica in replicas for name in replica.own))
    local_sketches = {name: [replica.own[name] for replica in replicas if name in replica.own] for name in names}
    scales = {name: math.hypot(*chain.from_iterable(local_sketches[name])) / math.sqrt(len(replicas)) for name in names}
    averages = {name: [sum(n) / len(replicas) for n in zip(*local_sketches[name], strict=True)] for name in names}
    diffs: list[list[Difference]] = []
    for replica in replicas:
        cached = (
            rank_diffs
            for peer, rank_diffs in zip(replicas, diffs, strict=False)
            if (peer.averaged, peer.eps, peer.hook) == (replica.averaged, replica.eps, replica.hook)
        )
        rank_diffs = next(cached, None)
        diffs.append(_differences_of(replica, averages, scales, len(replicas)) if rank_diffs is None else rank_diffs)
    return diffs


def _differences_of(
    replica: ReplicaCaptured, averages: Mapping[str, Sequence[float]], scales: Mapping[str, float], world_size: int
) -> list[Difference]:
    differences = []
    for name, expected in averages.items():
        scale = scales[name]
        if replica.hook:  # hooks may round away near-zero gradients, e.g. of a bias before BatchNorm
            scale = max(value for n, value in scales.items() if n.rpartition(".")[0] == name.rpartition(".")[0])
        actual = replica.averaged.get(name) or [0.0] * len(expected)
        if not all(map(math.isfinite, (*expected, *actual))):
            return []  # overflow: a gradient scaler skips the step
        tolerance = max(_TOLERANCE, (8 + world_size) * replica.eps.get(name, 0.0))
        delta, norm = math.dist(actual, expected), math.hypot(*expected)
        ratio = sum(map(mul, actual, expected)) / power if (power := norm * norm) else 0.0
        residual = math.dist(actual, [ratio * number for number in expected])
        differences.append(
            Difference(
                name,
                relative(delta, scale),
                tolerance,
                ratio=ratio,
                residual=relative(residual, scale),
                elements=len(expected),
                absolute_error=delta,
                reference_norm=norm,
            )
        )
    return differences
