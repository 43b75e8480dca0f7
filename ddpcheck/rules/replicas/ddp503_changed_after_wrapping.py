"""DDP503 changed-after-wrapping: error, stops_ddp, search_tolerates, spreads, stops_run

A parameter was added, replaced, removed, frozen, unfrozen, cast or moved after wrapping.

Why: DDP has put its hooks on the tensors that it found when it was constructed. Tensors that replace them have no
    hooks. (`.double().float()` and `.cpu().cuda()` replace tensors, pytorch issue 104336.) DDP waits for frozen
    parameters, and never reduces unfrozen and added ones. A forward pass that ties, replaces or deletes layers also
    comes too late. (PyTorch docs, DistributedDataParallel: do not change parameters after wrapping.)
Fix: Finish the module first, wrap it last; wrap again after any such change.
Detected: ddpcheck compares the module's parameters with those at the construction of the wrapper. It compares
    identity, dtype, device and requires_grad.
Ignore: If a parameter is frozen after wrapping and find_unused_parameters=True is set.
Line: The line that changes the parameters after wrapping, for example a call of load_state_dict or requires_grad_. If
    it is unknown, the line that creates the first parameter.
Checks: report wrapping, parameters; run loop, optimizers; repro next-reduction
Explains: DDP208 if same subjects; DDP101 DDP102 DDP103 DDP106 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306;
    DDP516 if only the loss; quietly DDP214 if of a copy
Reports: pytorch/pytorch#104336 Lightning-AI/pytorch-lightning#17937
Example:
    ddp = DistributedDataParallel(model)
    model.head = nn.Linear(8, 3)             # right: replace the head first, then wrap
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import ParameterChange, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, group_by, join_names, new_finding, plural, plural_verb, ranks_or_all
from ddpcheck.trace.replicas import Changes, changes_of_kind
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.unwrapped_params import VALUES_DIVERGED, Steps, gradients_agree, gradients_differ

_MIN_EQUAL_STEPS = 2  # optimizer steps with the same nonzero gradient on all ranks

_EFFECTS = {
    "replaced": "DDP still has the old {noun}, and never averages the gradient of the new one",
    "removed": "DDP still waits for {its} gradient",
    "frozen": "DDP still waits for {its} gradient",
    "unfrozen": "DDP does not know {it}, and never averages {its} gradient",
    "cast or moved": "DDP's hooks are on the old {noun}, and {its} gradient is never averaged",
}


def judge_changed_in_forward(evidence: Sequence[StepEvidence], wrapper: WrapperFacts, names: Names) -> list[Finding]:
    """DDP503: parameters that forward replaces, removes, freezes, unfreezes or casts after wrapping."""
    if not wrapper.is_ddp:
        return []
    groups: dict[tuple[ParameterChange, int], dict[str, set[int]]] = {}
    first: dict[str, tuple[ParameterChange, int]] = {}
    for item in sorted(evidence, key=lambda item: item.step):
        for name, change in item.changed.items():
            idle = change.kind in ("removed", "frozen")  # harmless if DDP searches for unused parameters
            if idle and (wrapper.tolerates_unused or not any(e.states.get(name) == "missing" for e in evidence)):
                continue
            key = first.setdefault(name, (change, item.step))
            groups.setdefault(key, {}).setdefault(name, set()).add(item.rank)
    world_size = len({item.rank for item in evidence})
    findings = []
    for (change, step), group in groups.items():
        subjects = names.subjects(group)
        words = {"it": plural_verb("the one", "those", subjects), "is_are": plural_verb("is", "are", subjects)}
        words |= {"its": plural_verb("its", "their", subjects), "noun": plural_verb("tensor", "tensors", subjects)}
        suffix = f" by {change.replacement}" if change.replacement else ""
        action = f"{plural_verb('was', 'were', subjects)} {change.kind}{suffix}"
        findings += new_finding(
            "DDP503",
            subjects,
            f"{join_names(subjects)} {action} in the forward pass of step {step}, after DDP had been constructed: "
            f"{_EFFECTS[change.kind].format(**words)}.",
            ranks=ranks_or_all(sorted(set().union(*group.values())), world_size),
            location=change.location or names.location(list(group)),
            fix="Make the change in __init__; keep values that each forward pass computes in a variable, as a plain "
            "tensor.",
        )
    return findings


def judge_changes(changes: Sequence[Mapping[str, str]], *, sharded: bool = False) -> list[Finding]:
    """DDP503: parameter changes since wrapping ("frozen", "added"), by name and rank."""
    names_by_kind: dict[str, dict[str, None]] = {}
    for name, kind in itertools.chain.from_iterable(rank_changes.items() for rank_changes in changes):
        names_by_kind.setdefault(kind, {})[name] = None
    if not names_by_kind:
        return []
    ranks = tuple(rank for rank, rank_changes in enumerate(changes) if rank_changes)
    changed = [f"{join_names([*n])} {plural_verb('was', 'were', [*n])} {kind}" for kind, n in names_by_kind.items()]
    consequence = "after wrapping; the reducer still has the old ones"
    if sharded:
        consequence = "after fully_shard, whose groups still gather the old ones"
    return new_finding(
        "DDP503",
        list(dict.fromkeys(itertools.chain.from_iterable(names_by_kind.values()))),
        f"{join_names(changed)} {consequence}.",
        ranks=ranks_or_all(ranks, len(changes)),
    )


def judge_assigned(changes: Changes) -> list[Finding]:
    """DDP503: assignments to `.data` of shards, which have no effect on a DTensor."""
    findings = []
    for location, group in group_by(changes_of_kind(changes, "ignored"), lambda change: change.location).items():
        names = list(dict.fromkeys(name for change in group for name in change.names))
        findings += new_finding(
            "DDP503",
            names,
            f"An assignment to .data of {plural(len(names), 'parameter')} that fully_shard has sharded has no "
            "effect: the DTensor keeps its previous values.",
            location=location,
            fix="Write values in place, under torch.no_grad(): parameter.copy_(values), parameter.mul_(factor); or "
            "load them by set_model_state_dict.",
        )
    return findings


def replaced_after_sharding(names: Sequence[str], where: Location | None, *, later: bool) -> list[Finding]:
    """Report parameters replaced after `fully_shard` (`later`: after the first forward pass)."""
    was, them = plural_verb("was", "were", names), plural_verb("it", "them", names)
    gathers = f"fully_shard gathers {them} no longer: the first forward pass fails on a plain tensor"
    if later:
        gathers = f"fully_shard still gathers the old {plural_verb('one', 'ones', names)}, and puts {them} back"
    return new_finding(
        "DDP503",
        names,
        f"{join_names(names)} {was} replaced after fully_shard: {gathers}.",
        location=where,
        fix="Replace parameters and tie them before fully_shard; after it, write values in place, under "
        "torch.no_grad(), or load them by set_model_state_dict.",
    )


def judge_replaced(changes: Changes) -> list[Finding]:
    """DDP503: assignments that replace sharded parameters after `fully_shard`."""
    replaced = group_by(changes_of_kind(changes, "replaced"), lambda change: (change.location, bool(change.forwards)))
    findings = []
    for (location, later), group in replaced.items():
        names = dict.fromkeys(name for change in group for name in change.names)
        findings += replaced_after_sharding(list(names), location, later=later)
    return findings


def relocate(finding: Finding, changes: Changes, _wrapped_at: Location | None) -> Finding:
    """Relocate a finding to the line that changes the parameters."""
    subjects = set(finding.subjects)
    loads = [change for rank_changes in changes for change in rank_changes if change.how == "load_state_dict"]
    for change in (*changes_of_kind(changes, "requires_grad", "parameters", "replaced"), *loads):
        matches = subjects.intersection(change.names) or any(name.startswith(f"{change.how}.") for name in subjects)
        if matches or change.how in subjects or (change.what == "requires_grad" and not change.names):
            finding = replace(finding, location=change.location)
            break
    return replace(finding, fix=_FIX_OF_LOAD) if finding.location in {load.location for load in loads} else finding


_FIX_OF_LOAD = "Load before wrapping, or without assign=True, which replaces the parameters by other tensors."


def explain_by_addition(names: Sequence[str], steps: Sequence[Steps]) -> list[Finding]:
    """DDP503: parameters added or unfrozen after wrapping, which the wrapper does not know."""
    was, them = plural_verb("was", "were", names), plural_verb("it", "them", names)
    return new_finding(
        "DDP503",
        names,
        f"{join_names(names)} {was} added or unfrozen after wrapping: every rank trains {them} on its own gradients.",
        location=steps[0][0].location,
        evidence=[VALUES_DIVERGED],
        fix="Finish the module first, wrap it last; wrap again after any such change.",
    )


def is_averaged_by_hand(facts: ScriptFacts, wrapper: int, finding: Finding) -> bool:
    """Return True if the script itself averages gradients of parameters that `finding` names."""
    if finding.code != "DDP503":
        return False
    for name in (f"{wrapper}/{subject}" for subject in finding.subjects):
        steps = [ranks for opt in facts.optimizers for ranks in opt.steps if name in ranks[0].local_params]
        agree = sum(gradients_agree(rank_steps, name) for rank_steps in steps)
        if agree < _MIN_EQUAL_STEPS or any(gradients_differ(rank_steps, name) for rank_steps in steps):
            return False
    return True
