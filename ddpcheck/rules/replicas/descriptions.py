"""Judges of module descriptions and wrapper constructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.replicas import SizedVariable, WrapperBegun
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by, plain_module, plain_name, plural
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_wrapper_order
from ddpcheck.rules.replicas.comparisons import ORDER, SET, SHAPE, Records
from ddpcheck.rules.replicas.ddp201_parameter_set import judge_parameter_set
from ddpcheck.rules.replicas.ddp202_parameter_order import judge_parameter_order
from ddpcheck.rules.replicas.ddp203_parameter_shape import judge_shape
from ddpcheck.rules.replicas.ddp204_parameter_dtype import judge_dtype
from ddpcheck.rules.replicas.ddp205_parameter_stride import judge_stride
from ddpcheck.rules.replicas.ddp206_requires_grad import judge_requires_grad
from ddpcheck.rules.replicas.ddp207_parameter_device import judge_device
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_initial_parameters
from ddpcheck.rules.replicas.ddp209_tied_parameters import judge_ties
from ddpcheck.rules.replicas.ddp211_buffer_set import judge_buffer_set
from ddpcheck.rules.replicas.ddp212_buffer_order import judge_buffer_order
from ddpcheck.rules.replicas.ddp213_buffer_shape_or_dtype import judge_shape_and_dtype
from ddpcheck.rules.replicas.ddp214_buffer_value import judge_initial_buffers
from ddpcheck.rules.replicas.ddp216_unregistered_state import judge_plain_tensors
from ddpcheck.rules.replicas.ddp221_wrapper_options import judge_wrapper_options
from ddpcheck.rules.replicas.ddp222_module_structure_or_mode import judge_compiled_modules, judge_modules


def judge_descriptions(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """Compare the module descriptions of all ranks (one description per rank)."""
    if descriptions.count(descriptions[0]) == len(descriptions):
        return []
    compiled = judge_compiled_modules(descriptions)
    descriptions = [*map(_strip_prefixes, descriptions)] if compiled else descriptions
    tensors = compare_parameters(descriptions) + compare_buffers(descriptions)
    modules = judge_modules(descriptions, explained=bool(tensors))
    return [*compiled, *tensors, *modules, *judge_plain_tensors([description.state for description in descriptions])]


def compare_parameters(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """Compare ties, names, order and attributes of parameters, each in one finding at most."""
    parameters = [description.parameters for description in descriptions]
    findings = judge_ties([description.ties for description in descriptions])
    untied = _drop_subjects(parameters, findings)
    findings += judge_parameter_set(untied) or judge_parameter_order(untied)
    for judge in (judge_shape, judge_dtype, judge_device, judge_stride, judge_requires_grad):
        findings += judge(_drop_subjects(parameters, findings))
    return findings


def _drop_subjects(records: Records, findings: Sequence[Finding]) -> Records:
    subjects = {subject for finding in findings for subject in finding.subjects}
    return [[record for record in rank_records if record.name not in subjects] for rank_records in records]


def compare_buffers(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """Compare names, order, shapes and dtypes of buffers."""
    buffers = [description.buffers for description in descriptions]
    return (judge_buffer_set(buffers) or judge_buffer_order(buffers)) + judge_shape_and_dtype(buffers)


def judge_layouts(descriptions: Sequence[ModuleDescription], step: int, *, broadcasts: bool) -> list[Finding]:
    """Compare the ranks' requires_grad, and names and shapes of broadcast buffers, after `step`."""
    findings = judge_requires_grad([description.parameters for description in descriptions])
    findings += compare_buffers(descriptions) if broadcasts else []
    why = f"equal on all ranks before; the forward or backward pass of step {step} changed it"
    return [
        replace(
            finding, message=f"After step {step}: {finding.message}", steps=(step,), evidence=(*finding.evidence, why)
        )
        for finding in findings
    ]


def _strip_prefixes(description: ModuleDescription) -> ModuleDescription:
    """Return the description without `_orig_mod`, which torch.compile adds to names."""
    return replace(
        description,
        parameters=tuple(replace(param, name=plain_name(param.name)) for param in description.parameters),
        buffers=tuple(replace(buffer, name=plain_name(buffer.name)) for buffer in description.buffers),
        ties=tuple(tuple(map(plain_name, names)) for names in description.ties),
        modules=tuple({plain_module(m[0]): (plain_module(m[0]), *m[1:]) for m in description.modules}.values()),
        state=tuple((plain_name(entry[0]), *entry[1:]) for entry in description.state),
    )


def judge_values_after_wrapping(
    parameters: Sequence[Mapping[str, int]], buffers: Sequence[Mapping[str, int]]
) -> list[Finding]:
    """Compare fingerprints of parameters and buffers after wrapping, by rank."""
    return judge_initial_parameters(parameters) + judge_initial_buffers(buffers)


@dataclass(frozen=True, slots=True)
class Reason:
    """Cause of a module mismatch, and the variable whose value is the cause."""

    text: str
    fix: str
    variable: SizedVariable | None = None


def judge_constructions(ranks: Sequence[Sequence[WrapperBegun]]) -> list[Finding]:
    """Compare the arguments of the DDP constructors on all ranks, in order.

    Compares the n-th wrappers of a process group on all ranks, since DDP pairs the collectives of these wrappers.
    """
    findings: list[Finding] = []
    for members in dict.fromkeys(wrapper.ranks for rank_wrappers in ranks for wrapper in rank_wrappers):
        group = [[w for w in ranks[rank] if w.ranks == members] for rank in members if rank < len(ranks)]
        if len(group) == len(members):
            findings += judge_wrapper_order(group) or chain.from_iterable(
                map(judge_construction, zip(*group, strict=False))
            )
    return findings


def judge_construction(wrappers: Sequence[WrapperBegun]) -> list[Finding]:
    """Compare the options and modules of one wrapper between ranks."""
    options = judge_wrapper_options([wrapper.options for wrapper in wrappers], "DistributedDataParallel")
    options = [replace(finding, location=wrappers[(finding.ranks or (0,))[0]].location) for finding in options]
    descriptions = [wrapper.description for wrapper in wrappers]
    if judge_compiled_modules(descriptions):
        descriptions = [*map(_strip_prefixes, descriptions)]
    findings = compare_parameters(descriptions)
    if any(wrapper.options.get("broadcast_buffers") != "False" for wrapper in wrappers):
        findings += compare_buffers(descriptions)
    return options + [_add_cause(finding, wrappers) for finding in findings]


def _add_cause(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Finding:
    explain = next((_EXPLANATIONS[tag] for tag in finding.tags if tag in _EXPLANATIONS), None)
    reason = explain(finding, wrappers) if explain else None
    path = _outermost_difference(finding, wrappers) if explain else ""
    construction_line = next((line for wrapper in wrappers if (line := _registration_line(wrapper, path))), None)
    variable = reason.variable if reason else None
    location = (variable and variable.location) or construction_line or wrappers[(finding.ranks or (0,))[0]].location
    if reason is None:
        return replace(finding, location=location)
    message = f"{finding.message.removesuffix('.')}: {reason.text}."
    evidence = finding.evidence
    if variable is not None and construction_line is not None:
        evidence = (f"{path} is made at {construction_line}", *evidence)
    tags = (COUNTED_BY_VARIABLE, variable.name) if variable is not None else ()
    return replace(finding, message=message, location=location, evidence=evidence, fix=reason.fix, tags=tags)


COUNTED_BY_VARIABLE = "counted by a variable"
"""Tag of a mismatch caused by the variable named in the next tag. The location is a line after the assignment."""


def _prefixes_of(name: str) -> list[str]:
    """Split "a.b.c" into ["a", "a.b", "a.b.c"]."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _registration_line(wrapper: WrapperBegun, name: str) -> Location | None:
    """Return the line that registers `name` or, if unknown, its nearest parent module."""
    description = wrapper.description
    names = {tensor.name for tensor in (*description.parameters, *description.buffers)}
    if name not in names.union(module[0] for module in description.modules):
        return None
    return next((wrapper.lines[path] for path in reversed(_prefixes_of(name)) if path and path in wrapper.lines), None)


def _outermost_difference(finding: Finding, wrappers: Sequence[WrapperBegun]) -> str:
    """Return the outermost parent module with differing classes, else the finding's first subject."""
    kinds = [{path: kind for path, kind, *_ in wrapper.description.modules} for wrapper in wrappers]
    *parents, name = _prefixes_of(finding.subjects[0])
    return next((path for path in parents if len({by_path.get(path) for by_path in kinds}) > 1), name)


def explain_size(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Reason | None:
    """Explain a size mismatch by a variable whose value differs between ranks."""
    for name in finding.subjects:
        tensors = [(*wrapper.description.parameters, *wrapper.description.buffers) for wrapper in wrappers]
        shapes = [next(t.shape for t in records if t.name == name) for records in tensors]
        if len({len(shape) for shape in shapes}) == 1:
            for dimension, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1 and (reason := _reason_for(sizes, wrappers, f"dimension {dimension} of {name}")):
                    return reason
    return None


def explain_missing_modules(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Reason | None:
    """Explain missing modules by a variable that sets their number, or by differing classes."""
    path = _outermost_difference(finding, wrappers)
    parent = path.rpartition(".")[0]
    counts = [sum(m[0].rpartition(".")[0] == parent and m[0] != "" for m in w.description.modules) for w in wrappers]
    if len(set(counts)) > 1 and (reason := _reason_for(counts, wrappers, f"the number of modules in {parent or 'it'}")):
        return reason
    kinds = [next((m[1] for m in wrapper.description.modules if m[0] == path), "not there") for wrapper in wrappers]
    if len(set(kinds)) == 1:
        return None
    return Reason(
        f"{path} is {_format_by_rank(kinds)}",
        fix=f"Put {path} into the model on every rank, or on none, before wrapping: not under a condition that the "
        "ranks answer differently.",
    )


def explain_order(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Reason | None:
    """Explain an order mismatch by iteration over a set (per-process hash seed)."""
    for path in wrappers[0].from_sets:
        inside = any(not path or name.startswith(f"{path}.") for name in finding.subjects)
        if inside and all(path in wrapper.from_sets for wrapper in wrappers):
            return Reason(
                f"the modules in {path or 'the model'} stand, on every rank, in the order in which the process "
                "iterates over a set of their names: it depends on Python's hash seed, which each process draws",
                fix="Iterate over sorted(...) of the set, or over a list, to create the modules.",
            )
    return None


_EXPLANATIONS = {SET: explain_missing_modules, ORDER: explain_order, SHAPE: explain_size}


def _reason_for(sizes: Sequence[int], wrappers: Sequence[WrapperBegun], noun: str) -> Reason | None:
    """Explain `sizes`, by rank, by a variable with the same differences between ranks."""
    by_name = [group_by(wrapper.sizes, lambda variable: variable.name) for wrapper in wrappers]
    candidates: list[tuple[int, bool, int, SizedVariable, str]] = []
    for index, (name, variables) in enumerate(by_name[0].items()):
        for first in variables:
            offset = sizes[0] - first.size
            matches = [
                next((v for v in groups.get(name, ()) if v.size == size - offset and v.kind == first.kind), None)
                for groups, size in zip(by_name, sizes, strict=True)
            ]
            if offset >= 0 and all(matches):
                plain = first.kind == "int"
                words = [str(v.size) if plain else f"a {v.kind} of {plural(v.size, 'item')}" for v in matches if v]
                candidates.append((offset, plain, index, first, _format_by_rank(words)))
    if not candidates:
        return None
    offset, _, _, variable, text = min(candidates, key=lambda candidate: candidate[:3])
    plus_offset = f" plus {offset}" if offset else ""
    return Reason(
        f"{noun} is the size of {variable.name}{plus_offset}; {variable.name} is {text}",
        f"Make {variable.name} the same on every rank before the model is built: from all the data and not from this "
        "rank's part, or on rank 0 with dist.broadcast_object_list.",
        variable,
    )


def _format_by_rank(values: Sequence[str]) -> str:
    """Format values by rank: "a on rank 0 and b on rank 1"."""
    groups = group_by(range(len(values)), lambda rank: values[rank])
    return " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())
