"""DDP2xx, 503 and 516: modules, wrapper options and program data that differ between ranks.

DDP pairs parameters and buffers by position, verifies few of its assumptions, and hangs or aborts on the rest
(https://docs.pytorch.org/docs/stable/notes/ddp.html).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord, are_harmless
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import (
    format_ranks,
    group_by,
    group_by_value,
    join_names,
    minority_of_any,
    minority_ranks,
    one_finding,
    plain_module,
    plain_name,
    plural_verb,
    told_by_rank,
    unless_all,
)
from ddpcheck.judge.judge_context import SingleProcessFacts

MODE = "training mode"  # differing attribute in DDP222 messages on train() versus eval()


def judge_descriptions(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """Compare the module descriptions of all ranks (one description per rank)."""
    if descriptions.count(descriptions[0]) == len(descriptions):
        return []
    compiled = [_compiled_in(description) for description in descriptions]
    if len(set(compiled)) > 1:
        return [*_judge_compiled(compiled), *judge_descriptions([*map(_as_written, descriptions)])]
    parameters = [description.parameters for description in descriptions]
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
    findings += _judge_buffers(descriptions)
    findings += _judge_modules(descriptions, explained=bool(findings))
    findings += _judge_state([description.state for description in descriptions])
    return findings


def _compiled_in(description: ModuleDescription) -> frozenset[str]:
    """Return the names of modules compiled by `torch.compile`, which nests each as `_orig_mod`."""
    return frozenset(plain_module(name) for name, *_ in description.modules if name.rpartition(".")[2] == "_orig_mod")


def _as_written(description: ModuleDescription) -> ModuleDescription:
    """Return the description with uncompiled names (`_orig_mod` removed)."""
    return replace(
        description,
        parameters=tuple(replace(param, name=plain_name(param.name)) for param in description.parameters),
        buffers=tuple(replace(buffer, name=plain_name(buffer.name)) for buffer in description.buffers),
        ties=tuple(tuple(map(plain_name, names)) for names in description.ties),
        modules=tuple({plain_module(m[0]): (plain_module(m[0]), *m[1:]) for m in description.modules}.values()),
        state=tuple((plain_name(entry[0]), *entry[1:]) for entry in description.state),
    )


def _judge_compiled(compiled: Sequence[frozenset[str]]) -> list[Finding]:
    """DDP222: modules compiled on some ranks only (`compiled`: compiled module names by rank)."""
    names = sorted(frozenset.union(*compiled) - frozenset.intersection(*compiled))
    ranks = [rank for rank, modules in enumerate(compiled) if not modules.isdisjoint(names)]
    return one_finding(
        "DDP222",
        [name or "(the model)" for name in names],
        f"torch.compile compiles {join_names([name or 'the model' for name in names])} on {format_ranks(ranks)} only.",
        ranks=unless_all(ranks, len(compiled)),
        evidence=["the keys of its state_dict have a different prefix there, and compiled code may round differently"],
        severity=Severity.WARNING,
        fix="Compile it on every rank, or on none.",
    )


def judge_layouts(descriptions: Sequence[ModuleDescription], step: int, *, broadcasts: bool) -> list[Finding]:
    """DDP206, 211, 212 and 213: layouts that diverge between ranks during `step`.

    Buffers are compared only if the wrapper `broadcasts` buffers.
    """
    parameters = [description.parameters for description in descriptions]
    diffs = _judge_attribute("DDP206", "requires_grad", "value of requires_grad", parameters, set())
    diffs += _judge_buffers(descriptions) if broadcasts else []
    why = f"equal on all ranks before; the forward or backward pass of step {step} changed it"
    return [
        replace(f, message=f"After step {step}: {f.message}", steps=(step,), evidence=(*f.evidence, why)) for f in diffs
    ]


def _judge_ties(ties: Sequence[tuple[tuple[str, ...], ...]]) -> list[Finding]:
    findings = []
    for names in sorted(set(itertools.chain.from_iterable(ties))):
        tied = ["tied" if names in rank_ties else "not tied" for rank_ties in ties]
        if "not tied" in tied:
            findings += one_finding(
                "DDP209",
                names,
                f"{' and '.join(names)} are one parameter on some ranks and several on others.",
                ranks=minority_ranks(tied),
                evidence=group_by_value(tied),
            )
    return findings


def _judge_tensors(
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


def _judge_attribute(
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


def _judge_buffers(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    buffers = [description.buffers for description in descriptions]
    findings = _judge_tensors(buffers, "buffer", "DDP211", "DDP212", set())
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


def _judge_modules(descriptions: Sequence[ModuleDescription], *, explained: bool) -> list[Finding]:
    modules = [description.modules for description in descriptions]
    classes = differing_values([{name: f"{kind}({options})" for name, kind, options, _ in mods} for mods in modules])
    modes = differing_values([{m[0]: "training" if m[3] else "evaluating" for m in mods} for mods in modules])
    inner = {name for name in modes for outer in modes if name != outer and (not outer or name.startswith(f"{outer}."))}
    findings = []
    for noun, mismatches in (
        ("class or options", {} if explained else classes),  # a reported mismatch also shows in the options
        (MODE, {name: values for name, values in modes.items() if name not in inner}),
    ):
        if names := list(mismatches):
            findings += one_finding(
                "DDP222",
                [name or "(the model)" for name in names],
                f"{join_names([name or 'the model' for name in names])} {plural_verb('does', 'do', names)} not have "
                f"the same {noun} on every rank.",
                ranks=minority_of_any(mismatches.values()) if noun != MODE else _odd_modes(list(mismatches.values())),
                evidence=told_by_rank({name or "(the model)": values for name, values in mismatches.items()}),
            )
    return findings


def _odd_modes(modes_by_name: Sequence[Sequence[str]]) -> list[int]:
    """Return the ranks in the rarer mode; on a tie, in eval mode."""
    odd = set(minority_of_any(modes_by_name))
    for modes in modes_by_name:
        if 2 * modes.count("evaluating") == len(modes):
            odd -= {rank for rank, mode in enumerate(modes) if mode == "training"}
            odd |= {rank for rank, mode in enumerate(modes) if mode == "evaluating"}
    return sorted(odd)


def _judge_state(state: Sequence[tuple[tuple[str, tuple[int, ...], int], ...]]) -> list[Finding]:
    mismatches = differing_values([{name: (shape, value) for name, shape, value in tensors} for tensors in state])
    if not mismatches:
        return []
    names = list(mismatches)
    return one_finding(
        "DDP216",
        names,
        f"{join_names(names)}, which the model holds and has not registered, {plural_verb('differs', 'differ', names)} "
        "between ranks; DDP never synchronises unregistered tensors.",
        ranks=minority_of_any(mismatches.values()),
        evidence=[f"{name}: {_compare_shapes([v[0] for v in values])}" for name, values in mismatches.items()],
    )


def _compare_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    difference = "other values" if len(set(shapes)) == 1 else f"other shapes: {'; '.join(group_by_value(shapes))}"
    return f"shape {shapes[0]}, {difference}"


def differing_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return names whose values differ between ranks, with the values by rank."""
    shared = [name for name in by_rank[0] if all(name in values for values in by_rank)]
    values = {name: [rank_values[name] for rank_values in by_rank] for name in shared}
    return {name: per_rank for name, per_rank in values.items() if len(set(per_rank)) > 1}


def differing_names(values: Sequence[Mapping[str, Hashable]]) -> dict[str, tuple[int, ...]]:
    """Return names whose values differ between ranks, with the minority ranks."""
    return {name: minority_ranks(per_rank) for name, per_rank in differing_values(values).items()}


def judge_values_before_sharding(before: Sequence[Mapping[str, int]], now: Mapping[str, int]) -> list[Finding]:
    """DDP208: parameters built with different values per rank before `fully_shard`."""
    mismatches = differing_values(before)
    remaining = {name: values for name, values in mismatches.items() if now.get(name) not in values}
    if not remaining:
        return []
    names = sorted(remaining)
    return one_finding(
        "DDP208",
        names,
        f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same values on every rank before "
        f"fully_shard, which broadcasts nothing: {plural_verb('it is', 'they are', names)} put together from parts of "
        "different models.",
        ranks=sorted({rank for values in remaining.values() for rank in minority_ranks(values)}),
        fix="Build the model under the same seed and from the same checkpoint on every rank; or hand rank 0's values "
        "out after fully_shard (set_model_state_dict with broadcast_from_rank0).",
    )


def judge_values_after_wrapping(
    parameters: Sequence[Mapping[str, int]], buffers: Sequence[Mapping[str, int]]
) -> list[Finding]:
    """DDP208 and 214: parameters and buffers that differ after wrapping (fingerprints by rank)."""
    findings = []
    for code, values in (("DDP208", parameters), ("DDP214", buffers)):
        mismatches = differing_names(values)
        if names := sorted(mismatches):
            findings += one_finding(
                code,
                names,
                f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same values on every rank before "
                "any gradients were averaged.",
                ranks=sorted(set(itertools.chain.from_iterable(mismatches.values()))),
                evidence=[f"{name}: differs on {format_ranks(ranks)}" for name, ranks in mismatches.items()],
                severity=Severity.ERROR,
            )
    return findings


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


def judge_program_data(facts: SingleProcessFacts) -> list[Finding]:
    """DDP216 and 516: plain values that differ between ranks with wrong gradients.

    A value that changes during the steps is state (DDP216), otherwise data (DDP516).
    """
    data = facts.known.program_data
    values = differing_values(data) if data else {}
    mismatches = [name for name in values if not _is_the_rank(values[name])]
    if not mismatches:
        return []
    away = (
        f"the ranks compute gradients that are up to {facts.largest_error:.2g} (relative) away from those of the "
        "global batch"
    )
    code = "DDP516"
    message = f"{join_names(mismatches)} {plural_verb('is', 'are', mismatches)} not the same on every rank, and {away}."
    if state := [name for name in mismatches if name in facts.known.changed_data]:
        code, mismatches, them = "DDP216", state, plural_verb("it", "them", state)
        message = (
            f"{join_names(state)} {plural_verb('changes', 'change', state)} in the steps, differently on each rank, "
            f"and nothing synchronises {them}: {away}."
        )
    return facts.one_finding(
        code,
        message,
        *told_by_rank({name: _around_difference(values[name]) for name in mismatches}),
        subjects=mismatches,
        severity=Severity.ERROR,
        ranks=minority_of_any(values[name] for name in mismatches),
    )


def judge_batches(batches: Sequence[tuple[int, ...]], step: int) -> list[Finding]:
    """DDP516: ranks whose `batch(step)` consistently differs (tensor fingerprints by rank)."""
    ranks = minority_ranks(batches)
    return one_finding(
        "DDP516",
        (f"batch({step})",),
        f"batch({step}) returns a different global batch on {format_ranks(ranks)}, and the same one each time it is "
        "called, so the ranks do not train on parts of one batch.",
        ranks=ranks,
        evidence=["inputs that differ between ranks: the hash seed, on which the order of a set depends, and the rank"],
    )


def judge_programs(facts: SingleProcessFacts) -> list[Finding]:
    """DDP516: ranks that compute a different loss on their shard than a single process.

    A warning under `find_unused_parameters`, which suggests that ranks use different parameters on purpose.
    """
    losses, expected = facts.known.local.losses, facts.analysis.shard_losses
    if len(losses) != len(expected):
        return []
    ranks = [r for r, (a, b) in enumerate(zip(losses, expected, strict=True)) if not math.isclose(a, b, rel_tol=1e-3)]
    if not ranks or len(ranks) == len(losses):
        return []
    rank = ranks[0]
    return facts.one_finding(
        "DDP516",
        f"On {format_ranks(ranks)} the model or the loss gives a different result from that of a single process on the "
        "same samples; on the other ranks it does not.",
        f"the loss on the shard of rank {rank} is {losses[rank]:.4g} there, and {expected[rank]:.4g} without it",
        ranks=ranks,
        severity=Severity.WARNING if facts.known.wrapper.find_unused_parameters else None,
    )


def _is_the_rank(values: Sequence[str]) -> bool:
    """Return True if each value is its rank or contains it ("cuda:1")."""
    spelled_out = {re.sub(rf"(?<!\d){rank}(?!\d)", "#", value) for rank, value in enumerate(values)}
    return len(spelled_out) == 1 and all(re.fullmatch(r"\d+|'.*'", value) for value in values)


_LONGEST_VALUE = 120


def _around_difference(values: Sequence[str]) -> list[str]:
    """Shorten long values to the part around the first difference."""
    if max(map(len, values)) <= _LONGEST_VALUE:
        return list(values)
    index = next((i for i, c in enumerate(zip(*values, strict=False)) if len(set(c)) > 1), min(map(len, values)))
    start = max(index - _LONGEST_VALUE // 3, 0)
    return [f"{'...' if start else ''}{value[start : start + _LONGEST_VALUE]}..." for value in values]


def judge_changes(changes: Sequence[Mapping[str, str]], *, sharded: bool = False) -> list[Finding]:
    """DDP503: parameter changes since wrapping ("frozen", "added"), by name and rank."""
    entries = dict.fromkeys((name, kind) for rank_changes in changes for name, kind in rank_changes.items())
    if not entries:
        return []
    by_what = {kind: [name for name, _ in pairs] for kind, pairs in group_by(entries, lambda change: change[1]).items()}
    ranks = tuple(rank for rank, rank_changes in enumerate(changes) if rank_changes)
    changed = [f"{join_names(names)} {plural_verb('was', 'were', names)} {kind}" for kind, names in by_what.items()]
    still = "after wrapping; the reducer still has the old ones"
    if sharded:
        still = "after fully_shard, whose groups still gather the old ones"
    return one_finding(
        "DDP503",
        list(dict.fromkeys(name for names in by_what.values() for name in names)),
        f"{join_names(changed)} {still}.",
        ranks=unless_all(ranks, len(changes)),
    )
