"""Findings on tensors, values and options that differ between ranks, for several rules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcheck.findings.evidence.modules import TensorRecord, are_harmless_differences
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import (
    format_by_rank,
    format_ranks,
    group_by,
    join_names,
    minority_of_any,
    minority_ranks,
    new_finding,
    plural,
    plural_verb,
    ranks_or_all,
)
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.replicas import RUNNING_STATISTICS, Divergence, ReplicaFacts, differing_names, differing_values

Records = Sequence[Sequence[TensorRecord]]  # parameters or buffers in order of registration, by rank
SET, ORDER, SHAPE = "set", "order", "shape"  # tags of findings that the modules or a variable may explain
IN_STEP = "in a step"  # tag of a change in a known step; without it, values differ from an unknown step on


def compare_sets(code: str, noun: str, records: Records) -> list[Finding]:
    sets = [frozenset(record.name for record in rank_records) for rank_records in records]
    mismatches = sorted(frozenset.union(*sets) - frozenset.intersection(*sets))
    if not mismatches:
        return []
    ranks_by_name = {name: [rank for rank, names in enumerate(sets) if name in names] for name in mismatches}
    common = Counter(sets).most_common(1)[0][0]
    return new_finding(
        code,
        mismatches,
        f"The ranks do not have the same {noun}s: {len(mismatches)} exist on some ranks only.",
        ranks=tuple(rank for rank, names in enumerate(sets) if names != common),
        evidence=[f"{name}: only on {format_ranks(ranks)}" for name, ranks in ranks_by_name.items()],
        tags=(SET,),
    )


def compare_order(code: str, noun: str, records: Records) -> list[Finding]:
    """Compare the order of tensors that all ranks have."""
    orders = [tuple(record.name for record in rank_records) for rank_records in records]
    indices = [index for index, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1]
    if not indices:
        return []
    ranks = minority_ranks(orders)
    expected = next(order for rank, order in enumerate(orders) if rank not in ranks)
    return new_finding(
        code,
        [expected[index] for index in indices],
        f"The {noun}s are registered in a different order on {format_ranks(ranks)}; DDP pairs them by position.",
        ranks=ranks,
        evidence=format_by_rank({f"{noun} number {indices[0]}": [order[indices[0]] for order in orders]}),
        tags=(ORDER,),
    )


def compare_attribute(code: str, attribute: str, noun: str, records: Records) -> list[Finding]:
    """Report tensors whose `attribute` differs, one finding per group of differing ranks."""
    mismatches = differing_values([{record.name: getattr(record, attribute) for record in r} for r in records])
    findings = []
    for ranks, names in group_by(mismatches, lambda name: minority_ranks(mismatches[name])).items():
        findings += new_finding(
            code,
            names,
            f"{join_names(names)} {plural_verb('has', 'have', names)} another {noun} on {format_ranks(ranks)} than "
            "elsewhere.",
            ranks=ranks,
            evidence=format_by_rank({name: mismatches[name] for name in names}),
            tags=(attribute,),
        )
    return findings


def judge_initial_values(code: str, values: Sequence[Mapping[str, int]]) -> list[Finding]:
    """Compare fingerprints of parameters or buffers after wrapping (`values`: by rank)."""
    mismatches = differing_names(values)
    if not mismatches:
        return []
    names = sorted(mismatches)
    return new_finding(
        code,
        names,
        f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same values on every rank before any "
        "gradients were averaged.",
        ranks=sorted(set(itertools.chain.from_iterable(mismatches.values()))),
        evidence=[f"{name}: differs on {format_ranks(ranks)}" for name, ranks in mismatches.items()],
        severity=Severity.ERROR,
    )


def judge_options(code: str, options: Sequence[Mapping[str, str]], noun: str) -> list[Finding]:
    """Compare the options of a wrapper or of an optimizer (`noun`) between ranks."""
    names = sorted(set(itertools.chain.from_iterable(options)))
    values = differing_values([{name: opts.get(name, "(not set)") for name in names} for opts in options])
    mismatches = ["class"] if "class" in values else list(values)  # a different class implies different options
    orders = {f"{name.removesuffix(' parameters')} order" for name in mismatches if name.endswith(" parameters")}
    mismatches = [name for name in mismatches if name not in orders]  # the order differs because the parameters do
    if not mismatches:
        return []
    return new_finding(
        code,
        mismatches,
        f"{noun} is not the same on every rank: {', '.join(mismatches)}.",
        ranks=minority_of_any(values[name] for name in mismatches),
        evidence=format_by_rank({name: _shorten_lists(name, values[name]) for name in mismatches}),
        severity=Severity.WARNING if are_harmless_differences(mismatches, options) else None,
    )


def _shorten_lists(name: str, values: Sequence[str]) -> list[str]:
    """Shorten parameter lists of ranks to what differs: the names, or the first position."""
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


def divergence_finding(
    code: str, facts: ReplicaFacts, divergence: Divergence, message: str, *evidence: str, **more: Any
) -> list[Finding]:
    count = len(facts.by_step)
    steps = ranks_or_all(range(divergence.step, count), count)
    evidence = (*evidence, *[f"optimizer state: {name}" for name in divergence.optimizer][:3])
    return facts.known.names.new_finding(code, divergence.names, message, steps=steps, evidence=evidence, **more)


def judge_buffers_after_steps(code: str, facts: ReplicaFacts, consequence: str) -> list[Finding]:
    """Report buffers that differ between ranks after a step (`consequence`: text with "{them}")."""
    known, mismatches = facts.known, facts.first_steps(lambda item: item.buffers)
    if not mismatches:
        return []
    names = list(mismatches)
    evidence = []
    if known.wrapper.is_ddp and not known.broadcasts_buffers:
        evidence.append(f"{known.wrapper_class or 'DistributedDataParallel'}.broadcast_buffers is False")
    if not_saved := [name for name in names if name in known.wrapper.not_saved]:
        evidence.append(f"a state dict leaves out {join_names(not_saved)} (persistent=False)")
    split = [name.rpartition(".") for name in names]
    if layers := list(dict.fromkeys(layer or "the module" for layer, _, last in split if last in RUNNING_STATISTICS)):
        takes = plural_verb("takes its", "take their", layers)
        evidence.append(f"{join_names(layers)} {takes} running statistics from each rank's own samples")
    return new_finding(
        code,
        names,
        f"{plural(len(names), 'buffer')} {plural_verb('differs', 'differ', names)} between ranks after step "
        f"{min(mismatches.values())}: {consequence.format(them=plural_verb('it', 'them', names))}.",
        location=known.names.location(names),
        severity=Severity.WARNING,
        evidence=evidence,
    )


def program_data_finding(
    code: str, facts: SingleProcessFacts, values: Mapping[str, Sequence[str]], difference: str
) -> list[Finding]:
    """Report variables (`values`, by rank) that differ, as the cause of wrong gradients."""
    return facts.new_finding(
        code,
        f"{join_names(list(values))} {difference} the ranks compute gradients that are up to "
        f"{facts.largest_error:.2g} (relative) away from those of the global batch.",
        *format_by_rank({name: _around_difference(by_rank) for name, by_rank in values.items()}),
        subjects=list(values),
        severity=Severity.ERROR,
        ranks=minority_of_any(values.values()),
    )


_LONGEST_VALUE = 120  # characters


def _around_difference(values: Sequence[str]) -> list[str]:
    if max(map(len, values)) <= _LONGEST_VALUE:
        return list(values)
    index = next((i for i, c in enumerate(zip(*values, strict=False)) if len(set(c)) > 1), min(map(len, values)))
    start = max(index - _LONGEST_VALUE // 3, 0)
    return [f"{'...' if start else ''}{value[start : start + _LONGEST_VALUE]}..." for value in values]
