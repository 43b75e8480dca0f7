"""DDP208, 214, 215, 222, 306, 503, 515: source lines that changed a wrapped module, for later findings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import (
    counted,
    format_ranks,
    group_by,
    group_by_value,
    join_names,
    make_finding,
    one_finding,
    plural_verb,
)
from ddpcheck.judge.replicas.descriptions import MODE

_OF_VALUES = ("values", "written")
_OTHERS = (*_OF_VALUES, "stepped", "buffer", "scale", "hook", "ignored", "module")
_OF_REDUCTION = ("DDP301", "DDP302", "DDP303")
REPLACED = "replaced"
_ORDER = ("load_state_dict", "apply")  # load_state_dict sets values, apply may; in-place writes come last

Changes = Sequence[Sequence[ModuleChanged]]  # changes of one wrapper, by rank


def at_the_change(finding: Finding, changes: Changes, made: Location | None) -> Finding:
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
        return _stepped_in_backward(finding, stepped[0])
    if finding.code in ("DDP208", "DDP515"):
        moved = _at_values(finding, changes, after_forward=False)
        return replace(moved, location=made) if moved is finding and finding.code == "DDP515" else moved
    if finding.code in ("DDP214", "DDP215"):
        return _at_write(finding, changes)
    if finding.code == "DDP222":
        return _at_mode(finding, changes)
    return _at_values(finding, changes, after_forward=True) if finding.code == "DDP306" else finding


def at_the_seed(finding: Finding, first: Sequence[OptimizerStep]) -> Finding:
    """Relocate DDP208 to the line that seeds the model differently per rank."""
    seeds = [step.seed for step in first]
    if finding.code != "DDP208" or None in seeds or len(set(seeds)) < 2 or first[0].seeded is None:
        return finding
    message = f"the model is created under a different seed on each rank: {'; '.join(group_by_value(seeds))}"
    moved = replace(finding, evidence=(*finding.evidence, message))
    return moved.relocated(first[0].seeded)


_LOAD = "Load before wrapping, or without assign=True, which replaces the parameters by other tensors."


def judge_ignored(changes: Changes) -> list[Finding]:
    """DDP503: assignments to `.data` of shards, which have no effect on a DTensor."""
    ignored = (change for change in itertools.chain.from_iterable(changes) if change.what == "ignored")
    findings = []
    for location, group in group_by(ignored, lambda change: change.location).items():
        names = list(dict.fromkeys(name for change in group for name in change.names))
        findings += one_finding(
            "DDP503",
            names,
            f"An assignment to .data of {counted(len(names), 'parameter')} that fully_shard has sharded has no "
            "effect: the DTensor keeps its previous values.",
            location=location,
            fix="Write values in place, under torch.no_grad(): parameter.copy_(values), parameter.mul_(factor); or "
            "load them by set_model_state_dict.",
        )
    return findings


def judge_replaced(changes: Changes) -> list[Finding]:
    """DDP503: parameters assigned over shards, which the next forward pass restores or rejects."""
    replaced = (change for change in itertools.chain.from_iterable(changes) if change.what == REPLACED)
    findings = []
    for (location, later), group in group_by(replaced, lambda change: (change.location, bool(change.forwards))).items():
        names = dict.fromkeys(name for change in group for name in change.names)
        findings += replaced_after_sharding(list(names), location, later=later)
    return findings


def judge_written_alone(changes: Changes, kept: Sequence[Mapping[str, int]]) -> list[Finding]:
    """DDP515: shards written before the first forward pass on some ranks only.

    Each rank has a different shard, so ranks cannot compare their values. `kept`: by rank, the parameters that still
    have their values from sharding.
    """
    early = [
        [call for call in calls if call.what in _OF_VALUES and not call.forwards and call.names] for calls in changes
    ]
    ranks: dict[str, set[int]] = {}
    for rank, rank_changes in enumerate(early):
        for name in itertools.chain.from_iterable(change.names for change in rank_changes):
            ranks.setdefault(name, set()).add(rank)
    names = [*ranks]
    writers = sorted(ranks[names[0]]) if names else []
    rest = [values for rank, values in enumerate(kept) if rank not in writers]
    if not writers or not rest or any(sorted(ranks[name]) != writers for name in names):
        return []
    if any(name not in values for values in rest for name in names):
        return []
    first = early[writers[0]][0]
    return one_finding(
        "DDP515",
        names,
        f"{join_names(names)} {plural_verb('is', 'are', names)} written after fully_shard on {format_ranks(writers)} "
        "only, which has only its own shard: the other shards keep their previous values.",
        ranks=writers,
        location=first.location,
        evidence=[f"{first.how} writes the shards there, before the first forward pass"],
        fix="Write shards on every rank; or initialise the model before fully_shard.",
    )


def replaced_after_sharding(names: Sequence[str], where: Location | None, *, later: bool) -> list[Finding]:
    """Report parameters replaced after `fully_shard` (`later`: after the first forward pass)."""
    was, them = plural_verb("was", "were", names), plural_verb("it", "them", names)
    gathers = f"fully_shard gathers {them} no longer: the first forward pass fails on a plain tensor"
    if later:
        gathers = f"fully_shard still gathers the old {plural_verb('one', 'ones', names)}, and puts {them} back"
    return one_finding(
        "DDP503",
        names,
        f"{join_names(names)} {was} replaced after fully_shard: {gathers}.",
        location=where,
        fix="Replace parameters and tie them before fully_shard; after it, write values in place, under "
        "torch.no_grad(), or load them by set_model_state_dict.",
    )


def _stepped_in_backward(finding: Finding, step: ModuleChanged) -> Finding:
    return make_finding(
        "DDP310",
        finding.subjects,
        f"A hook calls {step.how} while backward runs, before DDP has averaged the gradients: every rank steps with "
        "its own.",
        steps=finding.steps,
        location=step.location,
        related={"noticed": finding.location},
        evidence=finding.evidence,
        fix="Step after backward has returned, when the gradients are averaged; or have the hook leave the step to a "
        "communication hook of DDP, after its all_reduce.",
    )


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


def _at_write(finding: Finding, changes: Changes) -> Finding:
    """Relocate to the buffer's update; DDP214 also gets the updating ranks."""
    for name in finding.subjects:
        writes = {
            rank: change
            for rank, rank_changes in enumerate(changes)
            for change in rank_changes
            if change.what == "buffer" and name in change.names
        }
        only = finding.code == "DDP214" and 0 < len(writes) < len(changes)
        notes = [f"{name} changes on {format_ranks(writes)} only"] if only else []
        finding = replace(finding, evidence=(*finding.evidence, *notes), ranks=tuple(writes) if only else finding.ranks)
        if location := next((change.location for change in writes.values() if change.location is not None), None):
            return replace(finding, location=location)
    return finding


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
            fits = change.what in _OF_VALUES and bool(change.forwards) == after_forward
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
