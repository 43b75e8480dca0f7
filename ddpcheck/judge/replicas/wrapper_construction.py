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
    found: list[Finding] = []
    for members in dict.fromkeys(one.ranks for of_rank in ranks for one in of_rank):
        of_group = [[one for one in ranks[rank] if one.ranks == members] for rank in members if rank < len(ranks)]
        if len(of_group) < len(members):
            continue
        if other := judge_order(of_group):
            found += other
            continue
        for together in zip(*of_group, strict=False):
            found += judge_construction(together)
    return found


def judge_order(ranks: Sequence[Sequence[WrapperBegun]]) -> list[Finding]:
    """DDP403: wrappers constructed in a different order, so that DDP pairs different modules."""
    if not all(ranks):
        return []  # a rank without wrappers waits elsewhere, or has failed
    lines = [[str(one.location) for one in of_rank] for of_rank in ranks]
    permuted = len({tuple(sorted(of_rank)) for of_rank in lines}) == 1
    for number, together in enumerate(zip(*ranks, strict=False)):
        first = together[0]
        parted = [rank for rank, one in enumerate(together) if _is_another(one, first)]
        if not parted and permuted:
            parted = [rank for rank, one in enumerate(together) if one.location != first.location]
        if parted:
            if len({one.location.path if one.location else "" for one in together}) == 1:
                # Ranks at a later line have skipped the line at which the other ranks wait.
                line = min(one.location.line for one in together if one.location is not None)
                parted = [rank for rank, one in enumerate(together) if one.location and one.location.line == line]
            told = [f"{one.module} at {one.location}" for one in together]
            return one_finding(
                "DDP403",
                ("DistributedDataParallel",),
                f"Wrapper number {number + 1} differs between ranks: {'; '.join(group_by_value(told))}. The "
                "constructors of DDP wait for each other, and pair up in the order in which each rank calls them.",
                ranks=unless_all(parted, len(together)),
                location=together[parted[0]].location,
                evidence=group_by_value([" and ".join(f"{one.module} at {one.location}" for one in r) for r in ranks]),
                fix="Construct the same wrappers, in the same order, on every rank.",
            )
    return []


def _is_another(one: WrapperBegun, first: WrapperBegun) -> bool:
    """Return True if `one` wraps an unrelated module, not a variant of `first`."""
    if one.module == first.module or one.description == first.description:
        return False
    mine, theirs = ({(p.name, p.shape) for p in of.description.parameters} for of in (one, first))
    return mine.isdisjoint(theirs)


def judge_construction(together: Sequence[WrapperBegun]) -> list[Finding]:
    """Compare the options and modules of one wrapper between ranks."""
    broadcasts = any(one.options.get("broadcast_buffers") != "False" for one in together)
    codes = _OF_TENSORS + (_OF_BUFFERS if broadcasts else ())
    found = judge_options("DDP221", [one.options for one in together], "DistributedDataParallel")
    found = [replace(finding, location=together[(finding.ranks or (0,))[0]].location) for finding in found]
    described = judge_descriptions([one.description for one in together])
    return found + [_explained(finding, together) for finding in described if finding.code in codes]


def _explained(finding: Finding, together: Sequence[WrapperBegun]) -> Finding:
    """Add the cause, if known, and the source line to a finding."""
    reason = _EXPLANATIONS[finding.code](finding, together) if finding.code in _EXPLANATIONS else None
    path = _top_that_differs(finding, together) if finding.code in _EXPLANATIONS else ""
    made = next((line for one in together if (line := line_of(one, path)) and _has(one, path)), None)
    where = (reason and reason.location) or made or together[(finding.ranks or (0,))[0]].location
    if reason is None:
        return replace(finding, location=where)
    message = f"{finding.message.removesuffix('.')}: {reason.text}."
    evidence = finding.evidence
    if reason.variable is not None and made is not None:
        evidence = (f"{path} is made at {made}", *evidence)
    tags = (COUNTED, reason.variable.name) if reason.variable is not None else ()
    return replace(finding, message=message, location=where, evidence=evidence, fix=reason.fix, tags=tags)


COUNTED = "counted by a variable"
"""Tag of a mismatch caused by the variable named in the next tag. The location is a line after the assignment."""


def line_of(one: WrapperBegun, name: str) -> Location | None:
    """Return the line that registered `name`, else the line of its nearest parent."""
    while name:
        if name in one.lines:
            return one.lines[name]
        name = name.rpartition(".")[0]
    return None


def _has(one: WrapperBegun, path: str) -> bool:
    names = {m[0] for m in one.description.modules}
    return path in names or any(t.name == path for t in (*one.description.parameters, *one.description.buffers))


def _top_that_differs(finding: Finding, together: Sequence[WrapperBegun]) -> str:
    """Return the outermost differing module around the first subject, else the subject."""
    name = finding.subjects[0] if finding.subjects else ""
    kinds = [{path: kind for path, kind, *_ in one.description.modules} for one in together]
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if len({of_rank.get(path) for of_rank in kinds}) > 1:
            return path
    return name


# Why


def explain_size(finding: Finding, together: Sequence[WrapperBegun]) -> Reason | None:
    """Explain a size mismatch by a variable whose value differs between ranks."""
    for name in finding.subjects:
        shapes = [_record(one, name).shape for one in together]
        if len({len(shape) for shape in shapes}) == 1:
            for dimension, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1 and (reason := _counted(sizes, together, f"dimension {dimension} of {name}")):
                    return reason
    return None


def explain_set(finding: Finding, together: Sequence[WrapperBegun]) -> Reason | None:
    """Explain missing modules by a count variable or a differing module class."""
    path = _top_that_differs(finding, together)
    above = path.rpartition(".")[0]
    counts = [sum(m[0].rpartition(".")[0] == above and m[0] != "" for m in one.description.modules) for one in together]
    if len(set(counts)) > 1 and (reason := _counted(counts, together, f"the number of modules in {above or 'it'}")):
        return reason
    kinds = [next((m[1] for m in one.description.modules if m[0] == path), "not there") for one in together]
    if len(set(kinds)) == 1:
        return None
    return Reason(
        f"{path} is {_by_rank(kinds)}",
        fix=f"Put {path} into the model on every rank, or on none, before wrapping: not under a condition that the "
        "ranks answer differently.",
    )


def explain_order(finding: Finding, together: Sequence[WrapperBegun]) -> Reason | None:
    """Explain an order mismatch by iteration over a set (per-process hash seed)."""
    for path in together[0].from_sets:
        inside = any(not path or name.startswith(f"{path}.") for name in finding.subjects)
        if inside and all(path in one.from_sets for one in together):
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


def _record(one: WrapperBegun, name: str) -> TensorRecord:
    return next(t for t in (*one.description.parameters, *one.description.buffers) if t.name == name)


def _counted(sizes: Sequence[int], together: Sequence[WrapperBegun], what: str) -> Reason | None:
    """Find a variable whose size equals `sizes` up to a common offset."""
    by_name = [group_by(one.sizes, lambda variable: variable.name) for one in together]
    found: list[tuple[int, bool, int, SizedVariable, str]] = []
    for place, (name, of_first) in enumerate(by_name[0].items()):
        for first in of_first:
            offset = sizes[0] - first.size
            theirs = [
                next((v for v in of_rank.get(name, ()) if v.size == size - offset and v.kind == first.kind), None)
                for of_rank, size in zip(by_name, sizes, strict=True)
            ]
            if offset >= 0 and all(theirs):
                plain = first.kind == "int"
                told = _by_rank([_told(v) for v in theirs if v is not None])
                found.append((offset, plain, place, first, told))
    if not found:
        return None
    offset, _, _, variable, told = min(found, key=lambda one: one[:3])
    more = f" plus {offset}" if offset else ""
    return Reason(
        f"{what} is the size of {variable.name}{more}; {variable.name} is {told}",
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
