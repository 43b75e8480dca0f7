"""DDP201 to 207, 209, 211 to 213, 221 and 403: wrappers that ranks construct differently, and why.

DDP compares few of its arguments between ranks: it raises on one rank, aborts or hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import TensorRecord
from ddpcheck.findings.evidence.replicas import SizedVariable, WrapperBegun
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, group_by, group_by_value, one_finding, unless_all
from ddpcheck.judge.replicas.descriptions import judge_descriptions, judge_options

_OF_TENSORS = ("DDP201", "DDP202", "DDP203", "DDP204", "DDP205", "DDP206", "DDP207", "DDP209")
_OF_BUFFERS = ("DDP211", "DDP212", "DDP213")


@dataclass(frozen=True, slots=True)
class Reason:
    """Cause of a module mismatch: text, variable, line and fix."""

    text: str
    variable: SizedVariable | None = None
    location: Location | None = None
    fix: str = ""


def judge_constructions(ranks: Sequence[Sequence[WrapperBegun]]) -> list[Finding]:
    """Compare the arguments of the DDP constructors on all ranks, in order.

    The n-th wrapper of a process group is paired with the n-th wrapper on the other ranks, like the collectives.
    """
    findings: list[Finding] = []
    for members in dict.fromkeys(wrapper.ranks for rank_wrappers in ranks for wrapper in rank_wrappers):
        group = [[w for w in ranks[rank] if w.ranks == members] for rank in members if rank < len(ranks)]
        if len(group) < len(members):
            continue
        if order_findings := judge_order(group):
            findings += order_findings
            continue
        for wrappers in zip(*group, strict=False):
            findings += judge_construction(wrappers)
    return findings


def judge_order(ranks: Sequence[Sequence[WrapperBegun]]) -> list[Finding]:
    """DDP403: wrappers constructed in a different order, so that DDP pairs different modules."""
    if not all(ranks):
        return []  # a rank without wrappers waits elsewhere, or has failed
    lines = [[str(wrapper.location) for wrapper in rank_wrappers] for rank_wrappers in ranks]
    permuted = len({tuple(sorted(rank_lines)) for rank_lines in lines}) == 1
    for number, wrappers in enumerate(zip(*ranks, strict=False)):
        first = wrappers[0]
        parted = [rank for rank, wrapper in enumerate(wrappers) if _is_another(wrapper, first)]
        if not parted and permuted:
            parted = [rank for rank, wrapper in enumerate(wrappers) if wrapper.location != first.location]
        if parted:
            if len({wrapper.location.path if wrapper.location else "" for wrapper in wrappers}) == 1:
                # Ranks at a later line have skipped the line at which the other ranks wait.
                line = min(wrapper.location.line for wrapper in wrappers if wrapper.location is not None)
                parted = [rank for rank, w in enumerate(wrappers) if w.location and w.location.line == line]
            descriptions = [f"{wrapper.module} at {wrapper.location}" for wrapper in wrappers]
            return one_finding(
                "DDP403",
                ("DistributedDataParallel",),
                f"Wrapper number {number + 1} differs between ranks: {'; '.join(group_by_value(descriptions))}. The "
                "constructors of DDP wait for each other, and pair up in the order in which each rank calls them.",
                ranks=unless_all(parted, len(wrappers)),
                location=wrappers[parted[0]].location,
                evidence=group_by_value([" and ".join(f"{w.module} at {w.location}" for w in r) for r in ranks]),
                fix="Construct the same wrappers, in the same order, on every rank.",
            )
    return []


def _is_another(wrapper: WrapperBegun, first: WrapperBegun) -> bool:
    """Return True if `wrapper` wraps an unrelated module, not a variant of `first`."""
    if wrapper.module == first.module or wrapper.description == first.description:
        return False
    params, first_params = ({(p.name, p.shape) for p in each.description.parameters} for each in (wrapper, first))
    return params.isdisjoint(first_params)


def judge_construction(wrappers: Sequence[WrapperBegun]) -> list[Finding]:
    """Compare the options and modules of one wrapper between ranks."""
    broadcasts = any(wrapper.options.get("broadcast_buffers") != "False" for wrapper in wrappers)
    codes = _OF_TENSORS + (_OF_BUFFERS if broadcasts else ())
    findings = judge_options("DDP221", [wrapper.options for wrapper in wrappers], "DistributedDataParallel")
    findings = [replace(finding, location=wrappers[(finding.ranks or (0,))[0]].location) for finding in findings]
    described = judge_descriptions([wrapper.description for wrapper in wrappers])
    return findings + [_explained(finding, wrappers) for finding in described if finding.code in codes]


def _explained(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Finding:
    """Add the cause, if known, and the source line to a finding."""
    reason = _EXPLANATIONS[finding.code](finding, wrappers) if finding.code in _EXPLANATIONS else None
    path = _top_that_differs(finding, wrappers) if finding.code in _EXPLANATIONS else ""
    made_at = next((line for wrapper in wrappers if (line := line_of(wrapper, path)) and _has(wrapper, path)), None)
    location = (reason and reason.location) or made_at or wrappers[(finding.ranks or (0,))[0]].location
    if reason is None:
        return replace(finding, location=location)
    message = f"{finding.message.removesuffix('.')}: {reason.text}."
    evidence = finding.evidence
    if reason.variable is not None and made_at is not None:
        evidence = (f"{path} is made at {made_at}", *evidence)
    tags = (COUNTED, reason.variable.name) if reason.variable is not None else ()
    return replace(finding, message=message, location=location, evidence=evidence, fix=reason.fix, tags=tags)


COUNTED = "counted by a variable"
"""Tag of a mismatch caused by the variable named in the next tag. The location is a line after the assignment."""


def line_of(wrapper: WrapperBegun, name: str) -> Location | None:
    """Return the line that registered `name`, else the line of its nearest parent."""
    while name:
        if name in wrapper.lines:
            return wrapper.lines[name]
        name = name.rpartition(".")[0]
    return None


def _has(wrapper: WrapperBegun, path: str) -> bool:
    names = {m[0] for m in wrapper.description.modules}
    return path in names or any(t.name == path for t in (*wrapper.description.parameters, *wrapper.description.buffers))


def _top_that_differs(finding: Finding, wrappers: Sequence[WrapperBegun]) -> str:
    """Return the outermost differing module around the first subject, else the subject."""
    name = finding.subjects[0] if finding.subjects else ""
    kinds = [{path: kind for path, kind, *_ in wrapper.description.modules} for wrapper in wrappers]
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if len({rank_kinds.get(path) for rank_kinds in kinds}) > 1:
            return path
    return name


# Why


def explain_size(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Reason | None:
    """Explain a size mismatch by a variable whose value differs between ranks."""
    for name in finding.subjects:
        shapes = [_record(wrapper, name).shape for wrapper in wrappers]
        if len({len(shape) for shape in shapes}) == 1:
            for dimension, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1 and (reason := _counted(sizes, wrappers, f"dimension {dimension} of {name}")):
                    return reason
    return None


def explain_set(finding: Finding, wrappers: Sequence[WrapperBegun]) -> Reason | None:
    """Explain missing modules by a count variable or a differing module class."""
    path = _top_that_differs(finding, wrappers)
    above = path.rpartition(".")[0]
    counts = [sum(m[0].rpartition(".")[0] == above and m[0] != "" for m in w.description.modules) for w in wrappers]
    if len(set(counts)) > 1 and (reason := _counted(counts, wrappers, f"the number of modules in {above or 'it'}")):
        return reason
    kinds = [next((m[1] for m in wrapper.description.modules if m[0] == path), "not there") for wrapper in wrappers]
    if len(set(kinds)) == 1:
        return None
    return Reason(
        f"{path} is {_by_rank(kinds)}",
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


_EXPLANATIONS = {
    "DDP201": explain_set,
    "DDP202": explain_order,
    "DDP203": explain_size,
    "DDP211": explain_set,
    "DDP212": explain_order,
    "DDP213": explain_size,
}


def _record(wrapper: WrapperBegun, name: str) -> TensorRecord:
    return next(t for t in (*wrapper.description.parameters, *wrapper.description.buffers) if t.name == name)


def _counted(sizes: Sequence[int], wrappers: Sequence[WrapperBegun], noun: str) -> Reason | None:
    """Find a variable whose size equals `sizes` up to a common offset."""
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
                text = _by_rank([_told(v) for v in matches if v is not None])
                candidates.append((offset, plain, index, first, text))
    if not candidates:
        return None
    offset, _, _, variable, text = min(candidates, key=lambda candidate: candidate[:3])
    more = f" plus {offset}" if offset else ""
    return Reason(
        f"{noun} is the size of {variable.name}{more}; {variable.name} is {text}",
        variable,
        variable.location,
        f"Make {variable.name} the same on every rank before the model is built: from all the data and not from this "
        "rank's part, or on rank 0 with dist.broadcast_object_list.",
    )


def _by_rank(values: Sequence[str]) -> str:
    """Format values by rank: "a on rank 0 and b on rank 1"."""
    groups = group_by(range(len(values)), lambda rank: values[rank])
    return " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())


def _told(variable: SizedVariable) -> str:
    return str(variable.size) if variable.kind == "int" else f"a {variable.kind} of {counted(variable.size, 'item')}"
