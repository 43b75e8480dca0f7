"""DDP2xx: modules that are not the same on every rank.

DDP pairs parameters and buffers by position, checks little of what it relies on, and hangs or aborts on the rest
(https://docs.pytorch.org/docs/stable/notes/ddp.html). Pure functions from `findings.evidence.modules` (gathered by
`gather.state.module_description`) to findings.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.report import Finding
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import (
    format_ranks,
    group_by_value,
    join_names,
    make_finding,
    minority_of_any,
    minority_ranks,
    plural_verb,
)


def judge_descriptions(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """Findings on modules that are not built alike on all ranks (one description a rank)."""
    if descriptions.count(descriptions[0]) == len(descriptions):
        return []
    parameters = [description.parameters for description in descriptions]
    buffers = [description.buffers for description in descriptions]
    findings = [
        *(ties := _judge_ties([description.ties for description in descriptions])),
        *_judge_tensors(parameters, "parameter", "DDP201", "DDP202", {name for tie in ties for name in tie.subjects}),
    ]
    for code, attribute, noun in (
        ("DDP203", "shape", "shape"),
        ("DDP204", "dtype", "dtype"),
        ("DDP207", "device", "device type"),
        ("DDP205", "stride", "memory format (strides)"),
        ("DDP206", "requires_grad", "value of requires_grad"),
    ):
        explained = {subject for finding in findings for subject in finding.subjects}
        findings += _judge_attribute(code, attribute, noun, parameters, explained)
    findings += _judge_tensors(buffers, "buffer", "DDP211", "DDP212", set())
    findings += _judge_buffer_shapes(buffers)
    findings += _judge_modules(descriptions, explained=bool(findings))
    findings += _judge_state([description.state for description in descriptions])
    return findings


def judge_layouts(descriptions: Sequence[ModuleDescription], step: int, *, broadcasts: bool) -> list[Finding]:
    """DDP206, 211, 212 and 213 of modules that were alike on all ranks until the forward pass of `step`.

    Args:
        descriptions: By rank, its parameters and buffers after the step.
        step: Counted from 0.
        broadcasts: Whether the wrapper broadcasts buffers, so that theirs have to agree.
    """
    buffers = [description.buffers for description in descriptions]
    parameters = [description.parameters for description in descriptions]
    found = _judge_attribute("DDP206", "requires_grad", "value of requires_grad", parameters, set())
    if broadcasts:
        found += _judge_tensors(buffers, "buffer", "DDP211", "DDP212", set())
        found += _judge_buffer_shapes(buffers)
    return [
        replace(
            finding,
            message=f"After step {step}: {finding.message}",
            steps=(step,),
            evidence=(
                *finding.evidence,
                f"alike on all ranks before; the forward or backward pass of step {step} did it",
            ),
        )
        for finding in found
    ]


def _judge_ties(ties: Sequence[tuple[tuple[str, ...], ...]]) -> list[Finding]:
    every = sorted(set(itertools.chain.from_iterable(ties)))
    torn = [names for names in every if not all(names in of_rank for of_rank in ties)]
    return [
        make_finding(
            "DDP209",
            names,
            f"{' and '.join(names)} are one parameter on some ranks and several on others.",
            ranks=minority_ranks([names in of_rank for of_rank in ties]),
            evidence=group_by_value(
                [names in of_rank for of_rank in ties], lambda tied: "tied" if tied else "not tied"
            ),
        )
        for names in torn
    ]


def _judge_tensors(
    records: Sequence[tuple[TensorRecord, ...]], noun: str, set_code: str, order_code: str, explained: set[str]
) -> list[Finding]:
    orders = [tuple(record.name for record in of_rank if record.name not in explained) for of_rank in records]
    sets = [frozenset(order) for order in orders]
    if len(set(sets)) > 1:
        differing = sorted(frozenset.union(*sets) - frozenset.intersection(*sets))
        having = {name: [rank for rank, names in enumerate(sets) if name in names] for name in differing}
        common = Counter(sets).most_common(1)[0][0]
        return [
            make_finding(
                set_code,
                differing,
                f"The ranks do not have the same {noun}s: {len(differing)} exist on some ranks only.",
                ranks=tuple(rank for rank, names in enumerate(sets) if names != common),
                evidence=[f"{name}: only on {format_ranks(ranks)}" for name, ranks in having.items()],
            )
        ]
    if len(set(orders)) > 1:
        ranks = minority_ranks(orders)
        usual = next(order for rank, order in enumerate(orders) if rank not in ranks)
        moved = [name for place, name in enumerate(usual) if any(orders[rank][place] != name for rank in ranks)]
        place = next(i for i, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
        return [
            make_finding(
                order_code,
                moved,
                f"The {noun}s are registered in another order on {format_ranks(ranks)}; DDP pairs them by position.",
                ranks=ranks,
                evidence=[
                    f"{noun} number {place}: " + "; ".join(group_by_value([order[place] for order in orders])),
                ],
            )
        ]
    return []


def _judge_attribute(
    code: str, attribute: str, noun: str, records: Sequence[tuple[TensorRecord, ...]], explained: set[str]
) -> list[Finding]:
    differing = _differing_values([{record.name: getattr(record, attribute) for record in r} for r in records])
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, values in differing.items():
        if name not in explained:
            by_ranks.setdefault(minority_ranks(values), []).append(name)
    return [
        make_finding(
            code,
            names,
            f"{join_names(names)} {plural_verb('has', 'have', names)} another {noun} on "
            f"{format_ranks(ranks)} than elsewhere.",
            ranks=ranks,
            evidence=[f"{name}: " + "; ".join(group_by_value(differing[name])) for name in names],
        )
        for ranks, names in by_ranks.items()
    ]


def _judge_buffer_shapes(records: Sequence[tuple[TensorRecord, ...]]) -> list[Finding]:
    differing = _differing_values([{record.name: (record.shape, record.dtype) for record in r} for r in records])
    if not differing:
        return []
    names = list(differing)
    return [
        make_finding(
            "DDP213",
            names,
            f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same shape and dtype on every rank.",
            ranks=minority_of_any(differing.values()),
            evidence=[
                f"{name}: " + "; ".join(group_by_value(values, lambda v: f"{v[1]} of shape {v[0]}"))
                for name, values in differing.items()
            ],
        )
    ]


def _judge_modules(descriptions: Sequence[ModuleDescription], *, explained: bool) -> list[Finding]:
    by_name = [{name: rest for name, *rest in description.modules} for description in descriptions]
    shared = [name for name in by_name[0] if all(name in names for names in by_name)]
    findings = []
    for what, pick in (("class or options", lambda rest: (rest[0], rest[1])), ("training mode", lambda rest: rest[2])):
        if explained and what != "training mode":
            continue  # other shapes show in the options of their layers: the shapes are the cause
        differing = [name for name in shared if len({pick(names[name]) for names in by_name}) > 1]
        if not differing:
            continue
        top = [name for name in differing if not any(other != name and _is_inside(name, other) for other in differing)]
        top = differing if what != "training mode" else top
        values = {name: [pick(names[name]) for names in by_name] for name in top}

        def say(value: Any) -> str:
            return ("training" if value else "evaluating") if isinstance(value, bool) else f"{value[0]}({value[1]})"

        findings.append(
            make_finding(
                "DDP222",
                [name or "(the model)" for name in top],
                f"{join_names([name or 'the model' for name in top])} {plural_verb('does', 'do', top)} not have the "
                f"same {what} on every rank.",
                ranks=minority_of_any(values.values()),
                evidence=[f"{name or '(the model)'}: " + "; ".join(group_by_value(values[name], say)) for name in top],
            )
        )
    return findings


def _is_inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _judge_state(state: Sequence[tuple[tuple[str, tuple[int, ...], int], ...]]) -> list[Finding]:
    differing = _differing_values([{name: (shape, value) for name, shape, value in of_rank} for of_rank in state])
    if not differing:
        return []
    names = list(differing)
    return [
        make_finding(
            "DDP216",
            names,
            f"{join_names(names)}, which the model holds and has not registered, "
            f"{plural_verb('differs', 'differ', names)} between ranks; DDP never synchronises what is not registered.",
            ranks=minority_of_any(differing.values()),
            evidence=[f"{name}: {_compare_shapes([v[0] for v in values])}" for name, values in differing.items()],
        )
    ]


def _compare_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    others = "other values" if len(set(shapes)) == 1 else f"other shapes: {'; '.join(group_by_value(shapes))}"
    return f"shape {shapes[0]}, {others}"


def _differing_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The names that all ranks have with values that are not the same, each with the values by rank."""
    shared = [name for name in by_rank[0] if all(name in values for values in by_rank)]
    values = {name: [of_rank[name] for of_rank in by_rank] for name in shared}
    return {name: of_name for name, of_name in values.items() if len(set(of_name)) > 1}


def differing_names(values: Sequence[Mapping[str, Hashable]]) -> dict[str, tuple[int, ...]]:
    """The names whose value is not the same on all ranks, each with the ranks in the minority."""
    return {name: minority_ranks(of_name) for name, of_name in _differing_values(values).items()}


def judge_values_after_wrapping(
    parameters: Sequence[Mapping[str, int]], buffers: Sequence[Mapping[str, int]]
) -> list[Finding]:
    """Findings on parameters and buffers that differ although the wrapper should have synchronised them.

    Args:
        parameters: Fingerprints by name, one mapping a rank.
        buffers: Likewise.
    """
    findings = []
    for code, values in (("DDP208", parameters), ("DDP214", buffers)):
        differing = differing_names(values)
        if differing:
            findings.append(
                make_finding(
                    code,
                    sorted(differing),
                    f"{join_names(sorted(differing))} {plural_verb('does', 'do', list(differing))} not have the same "
                    "values on every rank when training starts.",
                    ranks=sorted(set(itertools.chain.from_iterable(differing.values()))),
                    evidence=[f"{name}: differs on {format_ranks(ranks)}" for name, ranks in differing.items()],
                    severity=Severity.ERROR,
                )
            )
    return findings
