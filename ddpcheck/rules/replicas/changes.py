"""Judges and locations of changes of modules after wrapping."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import locate_step_in_backward
from ddpcheck.rules.replicas.ddp214_buffer_value import locate_buffer_write
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import replaced_after_sharding
from ddpcheck.trace.changes import VALUE_CHANGES, Changes
from ddpcheck.trace.replicas import MODE

_OTHERS = (*VALUE_CHANGES, "stepped", "buffer", "scale", "hook", "ignored", "module")


_OF_REDUCTION = ("DDP301", "DDP302", "DDP303")


REPLACED = "replaced"


_ORDER = ("load_state_dict", "apply")  # load_state_dict sets values, apply may; in-place writes come last


def locate_change(finding: Finding, changes: Changes, made: Location | None) -> Finding:
    """Relocate a finding to the line of the change (`made`: the wrapping line)."""
    if finding.code == "DDP503":
        all_calls = [call for calls in changes for call in calls]
        loads = [call for call in all_calls if call.how == "load_state_dict"]  # e.g. with assign=True
        moved = _at_first(finding, [*(call for call in all_calls if call.what not in _OTHERS), *loads])
        return replace(moved, fix=_LOAD) if moved.location in {call.location for call in loads} else moved
    if finding.code in _OF_REDUCTION:
        kinds = ("hook", "scale") if finding.code == "DDP303" else ("hook",)
        return _at_reduction(finding, [call for calls in changes for call in calls if call.what in kinds])
    stepped = [call for calls in changes for call in calls if call.what == "stepped"]
    if stepped and finding.code in ("DDP306", "DDP515"):
        return locate_step_in_backward(finding, stepped[0])
    if finding.code in ("DDP208", "DDP515"):
        moved = _at_values(finding, changes, after_forward=False)
        return replace(moved, location=made) if moved is finding and finding.code == "DDP515" else moved
    if finding.code in ("DDP214", "DDP215"):
        return locate_buffer_write(finding, changes)
    if finding.code == "DDP222":
        return _at_mode(finding, changes)
    return _at_values(finding, changes, after_forward=True) if finding.code == "DDP306" else finding


_LOAD = "Load before wrapping, or without assign=True, which replaces the parameters by other tensors."


def judge_replaced(changes: Changes) -> list[Finding]:
    """DDP503: parameters assigned over shards, which the next forward pass restores or rejects."""
    replaced = (change for change in itertools.chain.from_iterable(changes) if change.what == REPLACED)
    findings = []
    for (location, later), group in group_by(replaced, lambda change: (change.location, bool(change.forwards))).items():
        names = dict.fromkeys(name for change in group for name in change.names)
        findings += replaced_after_sharding(list(names), location, later=later)
    return findings


def _at_reduction(finding: Finding, calls: Sequence[ModuleChanged]) -> Finding:
    """Relocate to the last call that decides how these gradients are reduced."""
    matching = [call for call in calls if call.what != "scale" or not set(call.names).isdisjoint(finding.subjects)]
    if not matching:
        return finding
    moved = replace(finding, evidence=(*finding.evidence, f"{matching[-1].how} is called there"))
    return moved.relocated(matching[-1].location)


def _at_mode(finding: Finding, changes: Changes) -> Finding:
    """Relocate to the last `eval` call on the finding's ranks, else everywhere."""
    until = finding.steps[0] if finding.steps else 0
    calls: dict[Location | None, list[tuple[int, ModuleChanged]]] = {}
    for rank, rank_changes in enumerate(changes):
        for change in rank_changes:
            if change.what == "mode" and change.step <= until and _covers(change.names[0], finding.subjects):
                calls.setdefault(change.location, []).append((rank, change))
    exact = {line: pairs for line, pairs in calls.items() if {rank for rank, _ in pairs} == set(finding.ranks)}
    common = {line: pairs for line, pairs in calls.items() if len({rank for rank, _ in pairs}) == len(changes)}
    if MODE not in finding.message or not (exact or len(common) == 1):
        return finding
    line = max(exact or common, key=lambda key: calls[key][0][1].step)
    ranks = f"{format_ranks(finding.ranks)} only" if exact else "every rank"
    message = f"eval() is called there, on {ranks}; {format_ranks(finding.ranks)} had not called train() since"
    return replace(finding, location=line, evidence=(*finding.evidence, message))


def _covers(path: str, subjects: Iterable[str]) -> bool:
    """Return True if all `subjects` are inside the module `path`."""
    return not path or all(subject == path or subject.startswith(f"{path}.") for subject in subjects)


def _at_first(finding: Finding, candidates: Iterable[ModuleChanged]) -> Finding:
    subjects = set(finding.subjects)
    for change in candidates:
        matches = subjects.intersection(change.names) or any(name.startswith(f"{change.how}.") for name in subjects)
        if matches or change.how in subjects or (change.what == "requires_grad" and not change.names):
            return replace(finding, location=change.location)
    return finding


def _at_values(finding: Finding, changes: Changes, *, after_forward: bool) -> Finding:
    """Relocate to a line that sets values, preferably on some ranks only."""
    ranks: dict[tuple[str, Location | None], list[int]] = {}
    names: dict[tuple[str, Location | None], set[str]] = {}
    for rank, rank_changes in enumerate(changes):
        for change in rank_changes:
            fits = change.what in VALUE_CHANGES and bool(change.forwards) == after_forward
            if fits and not set(finding.subjects).isdisjoint(change.names):
                ranks.setdefault((change.how, change.location), []).append(rank)
                names.setdefault((change.how, change.location), set()).update(change.names)
    some = {key: callers for key, callers in ranks.items() if len(callers) < len(changes)}
    if after_forward and not some:  # calls made by all ranks explain no difference, except writes by hand
        by_hand = [key for key in ranks if key[0] not in _ORDER]
        written = [key for key in by_hand if names[key] >= set(finding.subjects)]
        if not written and set(finding.subjects) <= {name for key in by_hand for name in names[key]}:
            written, lines = by_hand[:1], sorted({str(location) for _, location in by_hand[1:] if location is not None})
            finding = replace(finding, evidence=(*finding.evidence, *(f"others are written at {pos}" for pos in lines)))
        if len(written) != 1:
            return finding
        ranks = {written[0]: ranks[written[0]]}
    for (how, location), callers in sorted((some or ranks).items(), key=lambda item: _order(item[0][0])):
        only = f"only on {format_ranks(callers)}" if len(callers) < len(changes) else "on every rank"
        is_write = how not in _ORDER
        done = (
            f"they are written there ({how}), outside of the optimizer's step" if is_write else f"{how} is called there"
        )
        return replace(
            finding,
            location=location,
            ranks=tuple(callers) if len(callers) < len(changes) else finding.ranks,
            evidence=(*finding.evidence, f"{done}{'' if is_write else ' after wrapping'}, {only}"),
            fix="Write the same values on every rank (all_reduce the values that they depend on), or dist.broadcast "
            "them from rank 0."
            if is_write
            else finding.fix,
        )
    return finding


def _order(how: str) -> int:
    return _ORDER.index(how) if how in _ORDER else len(_ORDER)
