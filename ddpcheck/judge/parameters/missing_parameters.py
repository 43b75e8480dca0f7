"""DDP1xx: parameters missing from the loss, with cause, ranks, steps and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import ParameterChange, PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import Names, counted, group_by, join_names, one_finding, plural_verb, unless_all
from ddpcheck.judge.parameters.conditional_use import (
    AT_NEXT_FORWARD,
    SPARSE_ADVICE,
    SPARSE_REFUSED,
    ParameterFacts,
    judge_conditional_use,
)


def judge_parameters(
    evidence: Sequence[StepEvidence],
    wrapper: WrapperFacts,
    names: Names,
    *,
    nonzero_when_perturbed: frozenset[str] = frozenset(),
    zero_ends: Mapping[str, PathEnd] | None = None,
    ends_here: bool = True,
) -> list[Finding]:
    """Judge all parameters of a module."""
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
    """DDP101, 102 and 103: parameters that never contribute, one finding per cause and place."""
    names = [name for name in facts.trainable if len(facts.missing.get(name, ())) == len(facts.evidence)]
    missing = frozenset(names)

    def end_of(name: str) -> PathEnd:
        return next((item.path_ends[name] for item in facts.evidence if name in item.path_ends), PathEnd("unknown"))

    def cause_and_place(name: str) -> tuple[object, ...]:
        end = end_of(name)
        place = facts.family_of(name, missing) if end.cause == "unused" else end.edit_at
        return end.cause, end.reason, place, name in facts.wrapper.sparse

    groups = group_by(names, cause_and_place).values()
    return [finding for group in groups for finding in _always_missing(group, end_of(group[0]), facts)]


def _always_missing(group: Sequence[str], end: PathEnd, facts: ParameterFacts) -> list[Finding]:
    """Report parameters missing for one cause, with consequences under the wrapper's options."""
    wrapper, steps, them = facts.wrapper, len(facts.steps), plural_verb("it", "them", group)
    evidence = [] if wrapper.tolerates_unused or not wrapper.is_ddp else [AT_NEXT_FORWARD]
    if evidence and steps == 1 and facts.ends_here:
        evidence.append("after the last step there is no next forward, so that nothing is raised at all")
    code, message, details = _describe_cause(end, facts.names.subjects(group), them)
    sparse = group[0] in wrapper.sparse
    refused = sparse and wrapper.find_unused_parameters
    if refused:
        details.append(SPARSE_REFUSED)
    elif wrapper.tolerates_unused or wrapper.sharded:
        option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
        note = f"{option}=True keeps DDP from stopping"
        note = "fully_shard says nothing of it" if wrapper.sharded else note
        details.append(f"{note}; nothing has trained {them} in {counted(steps, 'step')}")
    harmless = (wrapper.tolerates_unused or wrapper.sharded) and code != "DDP103" and not refused
    fix = _fix_of_cut(end.reason) if code == "DDP103" else ""
    if harmless:
        fix = "Use the parameter in the loss, remove it, or freeze it with requires_grad_(False)."
    taking_turns = end.cause == "unused" and facts.others_take_turns(group)
    if taking_turns:
        details.append(
            "others of the same list contribute in some steps or on some ranks only: check more steps (--steps)"
        )
    mildest = Severity.WARNING if steps > 1 and not taking_turns else Severity.NOTE
    return facts.names.one_finding(
        code,
        group,
        message,
        severity=mildest if harmless else None,
        evidence=[*evidence, *details],
        fix=SPARSE_ADVICE if sparse else fix,
        location=end.edit_at,
        path=end.path_of(group[0]),
    )


def _fix_of_cut(reason: str) -> str:
    call, comma, _ = reason.partition(",")
    advice = f"Use differentiable operations of torch instead of {call}" if comma else f"Remove {call}"
    if "checkpoint" in call:
        advice = "Pass use_reentrant=False to checkpoint"
    elif call.startswith("torch."):
        advice = f"Run it outside of {call}"
    return f"{advice}. If the cut is intended, freeze the parameters (requires_grad_(False)) or give them another loss."


def _describe_cause(end: PathEnd, subjects: Sequence[str], them: str) -> tuple[str, str, list[str]]:
    """Return code, message and evidence for the missing gradient of `subjects`."""
    names = join_names(subjects)
    inside = f" (in module {end.module})" if end.module else ""
    if end.cause == "unused":
        return "DDP101", f"No operation of the forward pass reads {names}.", []
    if end.cause == "unknown":
        does = plural_verb("does", "do", subjects)
        return "DDP102", f"{names} {does} not contribute to the loss; the cause is unknown.", []
    if end.cause == "cut":
        begins = [f"{end.reason} begins at {end.no_grad_location}"]
        message = f"The path from {names} to the loss is cut by {end.reason}{end.at}{inside}."
        return "DDP103", message, begins if end.no_grad_location not in (None, end.location) else []
    last = f"the last operation that depends on {them} is {end.reason}{end.at}"
    return "DDP102", f"The result of {names}{end.at}{inside} does not reach the loss.", [last]


_CHANGES = {
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
        findings += one_finding(
            "DDP503",
            subjects,
            f"{join_names(subjects)} {action} in the forward pass of step {step}, after DDP had been constructed: "
            f"{_CHANGES[change.kind].format(**words)}.",
            ranks=unless_all(sorted(set().union(*group.values())), world_size),
            location=change.location or names.location(list(group)),
            fix="Make the change in __init__; keep values that each forward pass computes in a variable, as a plain "
            "tensor.",
        )
    return findings


def judge_lost_gradients(facts: ParameterFacts) -> list[Finding]:
    """DDP108: parameters that backward reaches, for which a function returns None.

    Compiled code also returns None for parameters that do not contribute in eager mode: DDP101, 102 or 103.
    """
    lost: dict[tuple[tuple[int, ...], PathEnd], list[str]] = {}
    for name in facts.trainable:
        if seen := [item for item in facts.evidence if item.states.get(name) == "lost"]:
            end = next((item.path_ends[name] for item in seen if name in item.path_ends), PathEnd("lost"))
            lost.setdefault((tuple(sorted({item.rank for item in seen})), end), []).append(name)
    findings = []
    for (ranks, end), group in lost.items():
        if end.cause in ("unused", "cut", "unreachable"):
            them = plural_verb("it", "them", group)
            code, message, details = _describe_cause(end, facts.names.subjects(group), them)
            findings += facts.names.one_finding(
                code,
                group,
                message,
                ranks=unless_all(ranks, facts.world_size),
                evidence=[*details, f"under torch.compile DDP gets zeros for {them} and raises no error"],
                location=end.edit_at,
                path=end.path_of(group[0]),
            )
            continue
        fn = end.reason or "a custom autograd Function between it and the loss"
        findings += facts.names.one_finding(
            "DDP108",
            group,
            f"Backward reaches {join_names(facts.names.subjects(group))} and gives no gradient: {fn}{end.at} returns "
            "None.",
            ranks=unless_all(ranks, facts.world_size),
            location=end.edit_at,
            path=end.path_of(group[0]),
        )
    return findings


def judge_zero_gradients(
    facts: ParameterFacts, nonzero_when_perturbed: frozenset[str], ends: Mapping[str, PathEnd]
) -> list[Finding]:
    """DDP107: gradients that are exactly zero, also for perturbed parameters.

    If every gradient is zero, nothing can be compared: DDP307.
    """
    zero = zero_everywhere(facts.evidence)
    always = [name for name in zero if name not in nonzero_when_perturbed]
    if not always or len(zero) == len([s for s in facts.evidence[0].states.values() if s != "missing"]):
        return []

    def place(name: str) -> PathEnd | str:
        top = facts.family_of(name, frozenset(always))
        return ends.get(name) or (name.rpartition(".")[0] or name if top == name else top)

    findings = []
    for group in group_by(always, place).values():
        end = ends.get(group[0])
        origin = f": it becomes zero in {end.reason}{end.at}" if end else ""
        subjects = join_names(facts.names.subjects(group))
        findings += facts.names.one_finding(
            "DDP107",
            group,
            f"The gradient of {subjects} is exactly zero in every step on every rank{origin}.",
            evidence=("in the last of these steps it stays zero for other values of the parameters",),
            location=end.edit_at if end else None,
            path=end.path_of(group[0]) if end else None,
        )
    return findings


def zero_everywhere(evidence: Sequence[StepEvidence]) -> list[str]:
    """Return parameters with exactly zero gradients on every rank in every step."""
    if not evidence:
        return []
    return [name for name in evidence[0].states if all(item.states.get(name) == "zero" for item in evidence)]


MADE_IN_FORWARD = "made in forward"  # tag of DDP106 findings on parameters created after DDP was constructed


def judge_unregistered(facts: ParameterFacts) -> list[Finding]:
    """DDP106: tensors that receive gradient but are no parameters of the wrapped module."""
    tensors: dict[str, UnregisteredTensor] = {}
    ranks: dict[str, set[int]] = {}
    for item in facts.evidence:
        for leaf in item.unregistered:
            tensors.setdefault(leaf.name, leaf)
            ranks.setdefault(leaf.name, set()).add(item.rank)

    def holder_and_ranks(leaf: UnregisteredTensor) -> tuple[bool, str, tuple[int, ...]]:
        name = leaf.name
        holder = name.split("[")[0] if "[" in name else name.rpartition(".")[0] or name
        return leaf.created_in_forward, holder, tuple(sorted(ranks[name]))

    groups = group_by(tensors.values(), holder_and_ranks)
    return [
        finding
        for (_, _, on_ranks), group in groups.items()
        for finding in _unregistered(group, unless_all(on_ranks, facts.world_size), facts.wrapper.named)
    ]


def _unregistered(leaves: Sequence[UnregisteredTensor], ranks: tuple[int, ...], by: str) -> list[Finding]:
    names = [leaf.name for leaf in leaves]
    text = f"{join_names(names)} {plural_verb('receives', 'receive', names)} gradient without being registered as a "
    text += "parameter of the model"
    if len(leaves) == 1 and leaves[0].kind:
        text = f"The {leaves[0].kind} {text}"
    if created_in_forward := leaves[0].created_in_forward:
        text = (
            f"{join_names(names)} {plural_verb('is', 'are', names)} created in the forward pass, after {by} has been "
        )
        text += "called" if by == "fully_shard" else "constructed"
    elements = sum(math.prod(leaf.shape) for leaf in leaves)
    return one_finding(
        "DDP106",
        names,
        f"{text}, so {by} never synchronises {plural_verb('it', 'them', names)}.",
        ranks=ranks,
        location=next((leaf.location for leaf in leaves if leaf.location), None),
        evidence=(f"{counted(len(names), 'tensor')}, {elements} elements",),
        fix="Make it in __init__; if its size is not known there, in a lazy module that runs forward before wrapping."
        if created_in_forward
        else "",
        tags=(MADE_IN_FORWARD,) if created_in_forward else (),
    )


def judge_needless_search(facts: ParameterFacts) -> list[Finding]:
    """DDP109: `find_unused_parameters=True` although every parameter always contributes."""
    if not facts.wrapper.find_unused_parameters or facts.missing or not facts.evidence:
        return []
    return one_finding(
        "DDP109",
        ("find_unused_parameters",),
        f"Every parameter contributed in {counted(len(facts.steps), 'step')} on every rank, "
        "so find_unused_parameters=True searches the graph for nothing.",
        evidence=("cost: one traversal of the autograd graph and one more all-reduce in every step",),
    )


def judge_uninitialised(names: Sequence[Sequence[str]]) -> list[Finding]:
    """DDP110: lazy parameters without a shape when the module is wrapped (names by rank)."""
    lazy = sorted({name for rank_names in names for name in rank_names})
    if not lazy:
        return []
    return one_finding(
        "DDP110",
        lazy,
        f"{join_names(lazy)} {plural_verb('is lazy and has', 'are lazy and have', lazy)} no shape yet, so DDP "
        "cannot wrap the model.",
        ranks=unless_all([rank for rank, rank_names in enumerate(names) if rank_names], len(names)),
    )


def judge_opaque_output(facts: ParameterFacts) -> list[Finding]:
    """DDP112: forward outputs in which DDP finds no tensor to search from."""
    output_type = next((item.output_type for item in facts.evidence if item.output_type), "")
    if not output_type or not facts.wrapper.tolerates_unused or not facts.wrapper.is_ddp:
        return []
    static = facts.wrapper.static_graph  # static_graph=True disables the search for unused parameters
    return one_finding(
        "DDP112",
        (output_type,),
        f"forward returns an object of class {output_type}, in which DDP finds no tensor: "
        f"{'static_graph' if static else 'find_unused_parameters'}=True depends on the tensors that DDP finds.",
        evidence=(
            "with static_graph=True DDP looks into tensors, lists, tuples, dicts and registered pytree nodes only, not "
            "into dataclasses or subclasses of dict: no gradient is averaged"
            if static
            else "DDP looks into tensors, lists, tuples, dicts and dataclasses only",
        ),
        fix="Return a tensor, tuple, list or dict of tensors from forward." if static else "",
    )


def judge_hidden_parameters(facts: ParameterFacts) -> list[Finding]:
    """DDP406: contributing parameters that DDP's search marks as unused."""
    hidden = list(dict.fromkeys(name for item in facts.evidence for name in item.hidden_from_ddp))
    if not hidden or not facts.wrapper.find_unused_parameters or not facts.wrapper.is_ddp:
        return []
    subjects = join_names(facts.names.subjects(hidden))
    return facts.names.one_finding(
        "DDP406",
        hidden,
        f"DDP takes {subjects} for unused and marks them ready, and then their gradients arrive.",
        evidence=(
            "they are used in a re-entrant checkpoint, which hides them from the search for unused parameters"
            if any(item.reentrant for item in facts.evidence)
            else "they reach the loss without the output of forward",
        ),
    )


def judge_repeated_arrival(facts: ParameterFacts) -> list[Finding]:
    """DDP406: gradients that arrive more than once in a backward pass."""
    arrivals = [arrival for item in facts.evidence for arrival in item.arrivals.items()]
    if not arrivals or facts.wrapper.static_graph or facts.wrapper.sharded:
        return []
    names = list(dict.fromkeys(name for name, _ in arrivals))
    times = max(count for _, count in arrivals)
    reason = "re-entrant checkpoints (use_reentrant=True) run a separate backward for each use"
    return facts.names.one_finding(
        "DDP406",
        names,
        f"The gradient of {join_names(facts.names.subjects(names))} arrives {times} times in one backward; DDP reduces "
        "it when it first arrives.",
        evidence=[reason] if any(item.reentrant for item in facts.evidence) else (),
        fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or static_graph=True.",
    )
