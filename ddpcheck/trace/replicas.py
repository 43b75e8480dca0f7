"""Descriptions, values and wrappers of replicas, compared between ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord, are_harmless
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import (
    format_ranks,
    group_by,
    join_names,
    minority_of_any,
    minority_ranks,
    one_finding,
    plural_verb,
    told_by_rank,
)
from ddpcheck.trace.check_context import JudgeContext

MODE = "training mode"  # differing attribute in DDP222 messages on train() versus eval()

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's normalisation layers


def judge_tensors(
    records: Sequence[tuple[TensorRecord, ...]], noun: str, set_code: str, order_code: str, explained: set[str]
) -> list[Finding]:
    orders = [tuple(record.name for record in rank_records if record.name not in explained) for rank_records in records]
    sets = [frozenset(order) for order in orders]
    if len(set(sets)) > 1:
        mismatches = sorted(frozenset.union(*sets) - frozenset.intersection(*sets))
        having = {name: [rank for rank, names in enumerate(sets) if name in names] for name in mismatches}
        common = Counter(sets).most_common(1)[0][0]
        return one_finding(
            set_code,
            mismatches,
            f"The ranks do not have the same {noun}s: {len(mismatches)} exist on some ranks only.",
            ranks=tuple(rank for rank, names in enumerate(sets) if names != common),
            evidence=[f"{name}: only on {format_ranks(ranks)}" for name, ranks in having.items()],
        )
    if len(set(orders)) > 1:
        ranks = minority_ranks(orders)
        expected = next(order for rank, order in enumerate(orders) if rank not in ranks)
        moved = [name for i, name in enumerate(expected) if any(orders[rank][i] != name for rank in ranks)]
        index = next(i for i, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
        return one_finding(
            order_code,
            moved,
            f"The {noun}s are registered in a different order on {format_ranks(ranks)}; DDP pairs them by position.",
            ranks=ranks,
            evidence=told_by_rank({f"{noun} number {index}": [order[index] for order in orders]}),
        )
    return []


def judge_attribute(
    code: str, attribute: str, noun: str, records: Sequence[tuple[TensorRecord, ...]], explained: set[str]
) -> list[Finding]:
    mismatches = differing_values([{record.name: getattr(record, attribute) for record in r} for r in records])
    findings = []
    unexplained = [name for name in mismatches if name not in explained]
    for ranks, names in group_by(unexplained, lambda name: minority_ranks(mismatches[name])).items():
        findings += one_finding(
            code,
            names,
            f"{join_names(names)} {plural_verb('has', 'have', names)} another {noun} on {format_ranks(ranks)} than "
            "elsewhere.",
            ranks=ranks,
            evidence=told_by_rank({name: mismatches[name] for name in names}),
        )
    return findings


def judge_buffers(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    buffers = [description.buffers for description in descriptions]
    findings = judge_tensors(buffers, "buffer", "DDP211", "DDP212", set())
    mismatches = differing_values([{b.name: f"{b.dtype} of shape {b.shape}" for b in bufs} for bufs in buffers])
    if names := list(mismatches):
        findings += one_finding(
            "DDP213",
            names,
            f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same shape and dtype on every rank.",
            ranks=minority_of_any(mismatches.values()),
            evidence=told_by_rank(mismatches),
        )
    return findings


def differing_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return names whose values differ between ranks, with the values by rank."""
    shared = [name for name in by_rank[0] if all(name in values for values in by_rank)]
    values = {name: [rank_values[name] for rank_values in by_rank] for name in shared}
    return {name: per_rank for name, per_rank in values.items() if len(set(per_rank)) > 1}


def differing_names(values: Sequence[Mapping[str, Hashable]]) -> dict[str, tuple[int, ...]]:
    """Return names whose values differ between ranks, with the minority ranks."""
    return {name: minority_ranks(per_rank) for name, per_rank in differing_values(values).items()}


def judge_options(code: str, options: Sequence[Mapping[str, str]], what: str) -> list[Finding]:
    """DDP221 (wrapper) or DDP223 (optimizer): options that differ between ranks."""
    names = sorted(set(itertools.chain.from_iterable(options)))
    values = {name: [rank_options.get(name, "(not set)") for rank_options in options] for name in names}
    mismatches = [name for name in names if len(set(values[name])) > 1]
    if not mismatches:
        return []
    if "class" in mismatches:
        mismatches = ["class"]  # a different class implies different options
    orders = {f"{name.removesuffix(' parameters')} order" for name in mismatches if name.endswith(" parameters")}
    mismatches = [name for name in mismatches if name not in orders]  # the order differs because the parameters do
    harmless = are_harmless(mismatches, options)
    return one_finding(
        code,
        mismatches,
        f"{what} is not the same on every rank: {', '.join(mismatches)}.",
        ranks=minority_of_any(values[name] for name in mismatches),
        evidence=told_by_rank({name: _differences(name, values[name]) for name in mismatches}),
        severity=Severity.WARNING if harmless else None,
    )


def _differences(name: str, values: Sequence[str]) -> list[str]:
    """Shorten parameter lists to the differing names or the first differing position."""
    if not name.endswith((" parameters", " order")):
        return list(values)
    lists = [value.split(", ") for value in values]
    if name.endswith(" order"):
        index = next((i for i, names in enumerate(zip(*lists, strict=False)) if len(set(names)) > 1), 0)
        return [f"number {index} is {names[index]}" for names in lists]
    common = set.intersection(*map(set, lists))
    return [
        join_names([n for n in names if n not in common] or ["none that the others lack"], most=6) for names in lists
    ]


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """State of the ranks after each step."""

    by_step: Mapping[int, Sequence[DdpStepEvidence]]  # evidence of all ranks by step, in order
    start: Sequence[Mapping[str, int]]  # parameter fingerprints before the first step, by rank
    known: JudgeContext  # other facts of the check

    def first_steps(self, pick: Callable[[DdpStepEvidence], Mapping[str, int]]) -> dict[str, int]:
        """Return names whose fingerprints differ between ranks, with the first differing step."""
        steps: dict[str, int] = {}
        for step, items in self.by_step.items():
            if items[0].apart:
                continue
            for name in differing_names([pick(item) for item in items]):
                steps.setdefault(name, step)
        return steps
