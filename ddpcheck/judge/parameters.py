"""DDP1xx: parameters that do not take part in the loss as DDP expects, with cause, ranks, steps and lines.

Pure functions from `findings.evidence.parameters` (gathered by `gather.phases.local_step`, in an unwrapped training
step) to findings.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.report import Finding
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import Names, counted, join_names, make_finding, plural_verb, unless_all
from ddpcheck.judge.conditional_use import judge_conditional_use
from ddpcheck.judge.forward_changes import judge_changed_in_forward
from ddpcheck.judge.gradient_arrival import judge_hidden_parameters, judge_opaque_output, judge_repeated_arrival
from ddpcheck.judge.parameter_facts import AT_NEXT_FORWARD, SPARSE_ADVICE, SPARSE_REFUSED, ParameterFacts, family_of


def judge_parameters(
    evidence: Sequence[StepEvidence],
    wrapper: WrapperFacts,
    names: Names,
    *,
    nonzero_when_perturbed: frozenset[str] = frozenset(),
    zero_ends: Mapping[str, PathEnd] | None = None,
    ends_here: bool = True,
) -> list[Finding]:
    """All findings on the parameters of a module.

    Args:
        evidence: Of every rank in every step.
        wrapper: The arguments of the wrapper.
        names: Of the parameters, with their aliases and lines.
        nonzero_when_perturbed: Parameters whose gradient was zero in every step, but is not for other values of the
            parameters.
        zero_ends: Where the gradient of the others became zero, as far as that is known.
        ends_here: Whether the run ends with the last of these steps.
    """
    changed = judge_changed_in_forward(evidence, wrapper, names)
    explained = {name for finding in changed for name in finding.subjects}
    facts = ParameterFacts.of(evidence, wrapper, names, ends_here=ends_here, explained=explained)
    findings = [
        *changed,
        *judge_always_missing(facts),
        *judge_conditional_use(facts),
        *judge_lost_gradients(facts),
        *judge_zero_gradients(facts, nonzero_when_perturbed, zero_ends or {}),
        *judge_unregistered(facts),
        *(judge_opaque_output(facts) or judge_hidden_parameters(facts)),
        *judge_repeated_arrival(facts),
    ]
    return findings or judge_needless_search(facts)


def judge_always_missing(facts: ParameterFacts) -> list[Finding]:
    """DDP101, 102 and 103: parameters that contribute in no step on no rank, one finding for each cause and place."""
    names, ends = facts.always_missing, {}
    groups: dict[Hashable, list[str]] = {}
    for name in names:
        end = next((item.path_ends[name] for item in facts.evidence if name in item.path_ends), PathEnd("unknown"))
        place = end.no_grad_location or end.location
        where = family_of(name, set(names), facts.trainable) if end.cause == "unused" else place
        groups.setdefault((end.cause, end.reason, where, name in facts.wrapper.sparse), []).append(name)
        ends[name] = end
    return [_always_missing(group, ends[group[0]], facts) for group in groups.values()]


def _always_missing(group: Sequence[str], end: PathEnd, facts: ParameterFacts) -> Finding:
    """A finding on parameters that are missing for one cause, and what it means under the options of the wrapper."""
    wrapper, steps, them = facts.wrapper, len(facts.steps), plural_verb("it", "them", group)
    evidence = [] if wrapper.tolerates_unused or not wrapper.is_ddp else [AT_NEXT_FORWARD]
    if evidence and steps == 1 and facts.ends_here:
        evidence.append("after the last step there is no next forward, so that nothing is raised at all")
    code, message, more = _describe_cause(end, facts.names.subjects(group), them)
    sparse = group[0] in wrapper.sparse
    refused = sparse and wrapper.find_unused_parameters
    if refused:
        more.append(SPARSE_REFUSED)
    elif wrapper.tolerates_unused:
        more.append(f"{facts.tolerating_option}=True keeps DDP from stopping; nothing ever trains {them}")
    harmless = wrapper.tolerates_unused and code != "DDP103" and not refused
    mildest = Severity.WARNING if steps > 1 else Severity.NOTE
    return make_finding(
        code,
        facts.names.subjects(group),
        message,
        severity=mildest if harmless else None,
        location=facts.names.location(group),
        evidence=[*evidence, *more],
        fix=SPARSE_ADVICE if sparse else "",
    )


def _describe_cause(end: PathEnd, subjects: Sequence[str], them: str) -> tuple[str, str, list[str]]:
    """Code, message and evidence for why no gradient reaches `subjects`."""
    names = join_names(subjects)
    at = f" at {end.location}" if end.location else ""
    inside = f" (in module {end.module})" if end.module else ""
    if end.cause == "unused":
        return "DDP101", f"No operation of the forward pass reads {names}.", []
    if end.cause == "unknown":
        does = plural_verb("does", "do", subjects)
        return "DDP102", f"{names} {does} not contribute to the loss; why could not be told.", []
    if end.cause == "cut":
        begins = [f"{end.reason} begins at {end.no_grad_location}"]
        message = f"The path from {names} to the loss is cut by {end.reason}{at}{inside}."
        return "DDP103", message, begins if end.no_grad_location not in (None, end.location) else []
    last = f"the last operation on what depends on {them} is {end.reason}{at}"
    return "DDP102", f"What {names} made{at}{inside} does not reach the loss.", [last]


def judge_lost_gradients(facts: ParameterFacts) -> list[Finding]:
    """DDP108: parameters that backward reaches, and for which a function returns None."""
    lost: dict[tuple[tuple[int, ...], PathEnd], list[str]] = {}
    for name in facts.trainable:
        seen = [item for item in facts.evidence if item.states.get(name) == "lost"]
        if seen:
            end = next((item.path_ends[name] for item in seen if name in item.path_ends), PathEnd("lost"))
            lost.setdefault((tuple(sorted({item.rank for item in seen})), end), []).append(name)
    findings = []
    for (ranks, end), group in lost.items():
        by = end.reason or "a custom autograd Function between it and the loss"
        at = f" at {end.location}" if end.location else ""
        subjects = facts.names.subjects(group)
        findings.append(
            make_finding(
                "DDP108",
                subjects,
                f"Backward reaches {join_names(subjects)} and gives no gradient: {by}{at} returns None.",
                ranks=unless_all(ranks, facts.world_size),
                location=facts.names.location(group),
            )
        )
    return findings


def judge_zero_gradients(
    facts: ParameterFacts, nonzero_when_perturbed: frozenset[str], ends: Mapping[str, PathEnd]
) -> list[Finding]:
    """DDP107: gradients that are exactly zero everywhere, and stay so for other values of the parameters.

    Where every gradient is zero, nothing can be compared at all: that is DDP307.
    """
    zero = zero_everywhere(facts.evidence)
    always = [name for name in zero if name not in nonzero_when_perturbed]
    if not always or len(zero) == len([s for s in facts.evidence[0].states.values() if s != "missing"]):
        return []
    groups: dict[object, list[str]] = {}
    for name in always:
        top = family_of(name, set(always), facts.trainable)
        groups.setdefault(ends.get(name) or (name.rpartition(".")[0] or name if top == name else top), []).append(name)
    findings = []
    for group in groups.values():
        end = ends.get(group[0])
        where = f": it becomes zero in {end.reason}{f' at {end.location}' if end.location else ''}" if end else ""
        subjects = facts.names.subjects(group)
        findings.append(
            make_finding(
                "DDP107",
                subjects,
                f"The gradient of {join_names(subjects)} is exactly zero in every step on every rank{where}.",
                location=facts.names.location(group),
                evidence=("it stays zero for other values of the parameters",),
            )
        )
    return findings


def zero_everywhere(evidence: Sequence[StepEvidence]) -> list[str]:
    """The parameters whose gradient was exactly zero on every rank in every step."""
    if not evidence:
        return []
    return [name for name in evidence[0].states if all(item.states.get(name) == "zero" for item in evidence)]


MADE_IN_FORWARD = "made in forward"
"""Tag of a DDP106 on parameters that DDP could not know of when it was constructed."""


def judge_unregistered(facts: ParameterFacts) -> list[Finding]:
    """DDP106: tensors that receive gradient and are no parameters of the module that DDP was given."""
    found: dict[str, UnregisteredTensor] = {}
    ranks: dict[str, set[int]] = {}
    for item in facts.evidence:
        for leaf in item.unregistered:
            found.setdefault(leaf.name, leaf)
            ranks.setdefault(leaf.name, set()).add(item.rank)
    groups: dict[tuple[bool, str, tuple[int, ...]], list[UnregisteredTensor]] = {}
    for name, leaf in found.items():
        holder = name.split("[")[0] if "[" in name else name.rpartition(".")[0] or name
        groups.setdefault((leaf.created_in_forward, holder, tuple(sorted(ranks[name]))), []).append(leaf)
    return [
        _unregistered(group, created_in_forward, unless_all(on_ranks, facts.world_size))
        for (created_in_forward, _, on_ranks), group in groups.items()
    ]


def _unregistered(leaves: Sequence[UnregisteredTensor], created_in_forward: bool, ranks: tuple[int, ...]) -> Finding:
    names = [leaf.name for leaf in leaves]
    it, kind = plural_verb("it", "them", names), ""
    if len(leaves) == 1 and leaves[0].kind:
        kind = f"The {leaves[0].kind} "
    message = (
        f"{kind}{join_names(names)} {plural_verb('receives', 'receive', names)} gradient without being registered as a "
        f"parameter of the model, so DDP never synchronises {it}."
    )
    if created_in_forward:
        message = (
            f"{join_names(names)} {plural_verb('is', 'are', names)} created in the forward pass, after DDP has been "
            f"constructed, so DDP never synchronises {it}."
        )
    elements = sum(math.prod(leaf.shape) for leaf in leaves)
    return make_finding(
        "DDP106",
        names,
        message,
        ranks=ranks,
        location=next((leaf.location for leaf in leaves if leaf.location), None),
        evidence=(f"{counted(len(names), 'tensor')}, {elements} elements",),
        fix="Make it in __init__; where its size is not known there, use a lazy module and run one forward "
        "pass before wrapping."
        if created_in_forward
        else "",
        tags=(MADE_IN_FORWARD,) if created_in_forward else (),
    )


def judge_needless_search(facts: ParameterFacts) -> list[Finding]:
    """DDP109: `find_unused_parameters=True` where every parameter always contributes."""
    if not facts.wrapper.find_unused_parameters or facts.missing or not facts.evidence:
        return []
    return [
        make_finding(
            "DDP109",
            ("find_unused_parameters",),
            f"Every parameter contributed in {counted(len(facts.steps), 'step')} on every rank, "
            "so find_unused_parameters=True searches the graph for nothing.",
            evidence=("cost: one traversal of the autograd graph and one more all-reduce in every step",),
        )
    ]


def judge_uninitialised(names: Sequence[Sequence[str]]) -> list[Finding]:
    """DDP110 for lazy parameters that have no shape when the module is about to be wrapped (names by rank)."""
    found = sorted({name for of_rank in names for name in of_rank})
    if not found:
        return []
    return [
        make_finding(
            "DDP110",
            found,
            f"{join_names(found)} {plural_verb('is lazy and has', 'are lazy and have', found)} no shape yet, so DDP "
            "cannot wrap the model.",
            ranks=unless_all([rank for rank, of_rank in enumerate(names) if of_rank], len(names)),
        )
    ]
