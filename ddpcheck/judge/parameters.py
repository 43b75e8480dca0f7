"""DDP1xx: parameters that do not take part in the loss as DDP expects, with cause, ranks, steps and lines.

The detectors are pure functions from `StepEvidence` (what one rank saw in one step of an ordinary, unwrapped
training step) to findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import Names, counted, join_names, unless_all
from ddpcheck.judge.conditional_use import (
    AT_NEXT_FORWARD,
    SPARSE_ADVICE,
    SPARSE_REFUSED,
    family_of,
    judge_changed_in_forward,
    judge_sometimes,
)

if TYPE_CHECKING:
    pass


def judge_parameters(
    evidence: Sequence[StepEvidence],
    wrapper: WrapperFacts,
    names: Names,
    *,
    awake: frozenset[str] = frozenset(),
    zero_ends: Mapping[str, PathEnd] | None = None,
    ends_here: bool = True,
) -> list[Finding]:
    """All findings on the parameters of a module.

    Args:
        evidence: Of every rank in every step.
        wrapper: What the wrapper was told.
        names: How to speak of the parameters.
        awake: Parameters whose gradient was zero in every step, but is not for other values of the parameters.
        zero_ends: Where the gradient of the others became zero, as far as that is known.
        ends_here: Whether the run ends with the last of these steps.
    """
    world_size = len({item.rank for item in evidence})
    steps = sorted({item.step for item in evidence})
    changed = judge_changed_in_forward(evidence, wrapper, names)
    told = {name for finding in changed for name in finding.subjects}
    missing: dict[str, list[StepEvidence]] = {}
    for item in evidence:
        for name, state in item.states.items():
            if state == "missing" and name not in told:
                missing.setdefault(name, []).append(item)
    trainable = list(evidence[0].states) if evidence else []
    always = [name for name in trainable if len(missing.get(name, ())) == len(evidence)]
    sometimes = [name for name in trainable if name in missing and name not in always]
    findings = changed + _judge_always(always, evidence, trainable, wrapper, names, ends_here=ends_here)
    if wrapper.find_unused_parameters:
        sometimes = [name for name in sometimes if name in wrapper.sparse]
    if sometimes:
        findings += judge_sometimes(
            sometimes, missing, trainable, world_size, steps, wrapper, names, ends_here=ends_here
        )
    findings += _judge_lost(evidence, names, world_size)
    findings += _judge_zero(evidence, awake, zero_ends or {}, names)
    findings += _judge_unregistered(evidence, world_size)
    findings += _judge_visibility(evidence, wrapper, names)
    if wrapper.find_unused_parameters and not missing and not findings and evidence:
        findings.append(
            Finding(
                code="DDP109",
                subjects=("find_unused_parameters",),
                message=f"Every parameter contributed in {counted(len(steps), 'step')} on every rank, "
                "so find_unused_parameters=True searches the graph for nothing.",
                severity=RULES["DDP109"].severity,
                evidence=("cost: one traversal of the autograd graph and one more all-reduce in every step",),
            )
        )
    return findings


def _judge_always(
    always: Sequence[str],
    evidence: Sequence[StepEvidence],
    trainable: Sequence[str],
    wrapper: WrapperFacts,
    names: Names,
    *,
    ends_here: bool,
) -> list[Finding]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    ends: dict[str, PathEnd] = {}
    for name in always:
        end = next((item.path_ends[name] for item in evidence if name in item.path_ends), PathEnd("unknown"))
        ends[name] = end
        where = (
            family_of(name, set(always), trainable) if end.cause == "unused" else end.no_grad_location or end.location
        )
        groups.setdefault((end.cause, end.reason, where, name in wrapper.sparse), []).append(name)
    steps = len({item.step for item in evidence})
    findings = []
    for group in groups.values():
        end, subjects = ends[group[0]], names.subjects(group)
        them = "it" if len(group) == 1 else "them"
        at = f" at {end.location}" if end.location else ""
        inside = f" (in module {end.module})" if end.module else ""
        facts = [] if wrapper.tolerates_unused or not wrapper.is_ddp else [AT_NEXT_FORWARD]
        if facts and steps == 1 and ends_here:
            facts.append("after the last step there is no next forward, so that nothing is raised at all")
        if end.cause == "unused":
            code, message = "DDP101", f"No operation of the forward pass reads {join_names(subjects)}."
        elif end.cause == "unknown":
            does = "does" if len(subjects) == 1 else "do"
            code, message = (
                "DDP102",
                f"{join_names(subjects)} {does} not contribute to the loss; why could not be told.",
            )
        elif end.cause == "cut":
            code = "DDP103"
            message = f"The path from {join_names(subjects)} to the loss is cut by {end.reason}{at}{inside}."
            if end.no_grad_location not in (None, end.location):
                facts.append(f"{end.reason} begins at {end.no_grad_location}")
        else:
            code = "DDP102"
            message = f"What {join_names(subjects)} made{at}{inside} does not reach the loss."
            facts.append(f"the last operation on what depends on {them} is {end.reason}{at}")
        sparse = group[0] in wrapper.sparse
        refused = sparse and wrapper.find_unused_parameters
        mild = wrapper.tolerates_unused and code != "DDP103" and not refused
        mildest = Severity.WARNING if steps > 1 else Severity.NOTE
        if refused:
            facts.append(SPARSE_REFUSED)
        elif wrapper.tolerates_unused:
            option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
            facts.append(f"{option}=True keeps DDP from stopping; nothing ever trains {them}")
        findings.append(
            Finding(
                code=code,
                subjects=subjects,
                message=message,
                severity=mildest if mild else RULES[code].severity,
                location=names.location(group),
                evidence=tuple(facts),
                fix=SPARSE_ADVICE if sparse else "",
            )
        )
    return findings


def _judge_lost(evidence: Sequence[StepEvidence], names: Names, world_size: int) -> list[Finding]:
    lost: dict[tuple[tuple[int, ...], PathEnd], list[str]] = {}
    for name in evidence[0].states if evidence else ():
        seen = [item for item in evidence if item.states.get(name) == "lost"]
        if seen:
            end = next((item.path_ends[name] for item in seen if name in item.path_ends), PathEnd("lost"))
            lost.setdefault((tuple(sorted({item.rank for item in seen})), end), []).append(name)
    findings = []
    for (ranks, end), group in lost.items():
        by = end.reason or "a custom autograd Function between it and the loss"
        at = f" at {end.location}" if end.location else ""
        findings.append(
            Finding(
                code="DDP108",
                subjects=names.subjects(group),
                message=f"Backward reaches {join_names(names.subjects(group))} and gives no gradient: {by}{at} returns "
                "None.",
                severity=RULES["DDP108"].severity,
                ranks=unless_all(ranks, world_size),
                location=names.location(group),
            )
        )
    return findings


def _judge_zero(
    evidence: Sequence[StepEvidence], awake: frozenset[str], ends: Mapping[str, PathEnd], names: Names
) -> list[Finding]:
    zero = zero_everywhere(evidence)
    asleep = [name for name in zero if name not in awake]
    if not asleep or len(zero) == len([s for s in evidence[0].states.values() if s != "missing"]):
        return []  # where every gradient is zero, nothing can be compared at all: that is DDP307
    groups: dict[object, list[str]] = {}
    for name in asleep:
        top = family_of(name, set(asleep), list(evidence[0].states))
        groups.setdefault(ends.get(name) or (name.rpartition(".")[0] or name if top == name else top), []).append(name)
    findings = []
    for group in groups.values():
        end = ends.get(group[0])
        where = f": it becomes zero in {end.reason}{f' at {end.location}' if end.location else ''}" if end else ""
        findings.append(
            Finding(
                code="DDP107",
                subjects=names.subjects(group),
                message=f"The gradient of {join_names(names.subjects(group))} is exactly zero in every step on every "
                f"rank{where}.",
                severity=RULES["DDP107"].severity,
                location=names.location(group),
                evidence=("it stays zero for other values of the parameters",),
            )
        )
    return findings


def zero_everywhere(evidence: Sequence[StepEvidence]) -> list[str]:
    """The parameters whose gradient was exactly zero on every rank in every step."""
    if not evidence:
        return []
    return [name for name in evidence[0].states if all(item.states.get(name) == "zero" for item in evidence)]


def _judge_unregistered(evidence: Sequence[StepEvidence], world_size: int) -> list[Finding]:
    found: dict[str, UnregisteredTensor] = {}
    ranks: dict[str, set[int]] = {}
    for item in evidence:
        for leaf in item.unregistered:
            found.setdefault(leaf.name, leaf)
            ranks.setdefault(leaf.name, set()).add(item.rank)
    groups: dict[tuple[bool, str, tuple[int, ...]], list[str]] = {}
    for name in found:
        holder = name.split("[")[0] if "[" in name else name.rpartition(".")[0] or name
        groups.setdefault((found[name].created_in_forward, holder, tuple(sorted(ranks[name]))), []).append(name)
    findings = []
    for (late, _, on_ranks), group in groups.items():
        one = len(group) == 1
        elements = sum(math.prod(found[name].shape) for name in group)
        kind = f"The {found[group[0]].kind} " if one and found[group[0]].kind else ""
        message = (
            f"{kind}{join_names(group)} {'receives' if one else 'receive'} gradient without being registered as a "
            f"parameter of the model, so DDP never synchronises {'it' if one else 'them'}."
        )
        if late:
            message = (
                f"{join_names(group)} {'is' if one else 'are'} created in the forward pass, after DDP has been "
                f"constructed, so DDP never synchronises {'it' if one else 'them'}."
            )
        findings.append(
            Finding(
                code="DDP106",
                subjects=tuple(group),
                message=message,
                severity=RULES["DDP106"].severity,
                ranks=unless_all(on_ranks, world_size),
                location=next((found[name].location for name in group if found[name].location), None),
                evidence=(f"{len(group)} tensor{'' if one else 's'}, {elements} elements",),
                fix="Make it in __init__; where its size is not known there, use a lazy module and run one forward "
                "pass before wrapping."
                if late
                else "",
                tags=(MADE_IN_FORWARD,) if late else (),
            )
        )
    return findings


MADE_IN_FORWARD = "made in forward"
"""Tag of a DDP106 on parameters that DDP could not know of when it was constructed."""


def _judge_visibility(evidence: Sequence[StepEvidence], wrapper: WrapperFacts, names: Names) -> list[Finding]:
    """DDP112 and DDP406: what arrives twice, and what DDP's search for unused parameters cannot see."""
    findings = []
    if wrapper.tolerates_unused and wrapper.is_ddp:
        invisible = list(dict.fromkeys(name for item in evidence for name in item.hidden_from_ddp))
        output_type = next((item.output_type for item in evidence if item.output_type), "")
        reentrant = any(item.reentrant for item in evidence)
        if output_type:
            option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
            findings.append(
                Finding(
                    code="DDP112",
                    subjects=(output_type,),
                    message=f"forward returns an object of class {output_type}, in which DDP finds no tensor: "
                    f"{option}=True works from what it finds there.",
                    severity=RULES["DDP112"].severity,
                    evidence=("DDP looks into tensors, lists, tuples, dicts and dataclasses only",),
                )
            )
        elif invisible and wrapper.find_unused_parameters:
            why = (
                "they are used in a re-entrant checkpoint, which hides them from the search for unused parameters"
                if reentrant
                else "they reach the loss by another way than what forward returned"
            )
            findings.append(
                Finding(
                    code="DDP406",
                    subjects=names.subjects(invisible),
                    message=f"DDP takes {join_names(names.subjects(invisible))} for unused and marks them ready, "
                    "and then their gradients arrive.",
                    severity=RULES["DDP406"].severity,
                    location=names.location(invisible),
                    evidence=(why,),
                )
            )
    arrivals: dict[str, int] = {}
    for item in evidence:
        for name, count in item.arrivals.items():
            arrivals[name] = max(count, arrivals.get(name, 0))
    if arrivals and not wrapper.static_graph:
        group = list(arrivals)
        findings.append(
            Finding(
                code="DDP406",
                subjects=names.subjects(group),
                message=f"The gradient of {join_names(names.subjects(group))} arrives {max(arrivals.values())} times "
                "in one backward; DDP reduces it when it arrives first.",
                severity=RULES["DDP406"].severity,
                location=names.location(group),
                evidence=("re-entrant checkpoints (use_reentrant=True) run a backward of their own for each use",)
                if any(item.reentrant for item in evidence)
                else (),
                fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or static_graph=True.",
            )
        )
    return findings


def judge_uninitialised(names: Sequence[Sequence[str]]) -> list[Finding]:
    """DDP110 for lazy parameters that have no shape when the module is about to be wrapped (names by rank)."""
    found = sorted({name for of_rank in names for name in of_rank})
    ranks = tuple(rank for rank, of_rank in enumerate(names) if of_rank)
    if not found:
        return []
    return [
        Finding(
            code="DDP110",
            subjects=tuple(found),
            message=f"{join_names(found)} {'is lazy and has' if len(found) == 1 else 'are lazy and have'} no shape "
            "yet, so DDP cannot wrap the model.",
            severity=RULES["DDP110"].severity,
            ranks=unless_all(ranks, len(names)),
        )
    ]


# The same question for any loop
