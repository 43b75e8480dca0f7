"""DDP104 and DDP105: parameters that contribute to the loss on some ranks, or in some steps, and not in others.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import ParameterChange, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import (
    Names,
    format_ranks,
    format_steps,
    join_names,
    make_finding,
    plural_verb,
    unless_all,
)

AT_NEXT_FORWARD = "plain DDP raises 'Expected to have finished reduction in the prior iteration' at the next forward"


SPARSE_REFUSED = (
    "with find_unused_parameters=True DDP raises 'Expected sparse gradient to be defined' in backward: for a table "
    "with sparse=True it has no gradient to put in the place of the missing one"
)
SPARSE_ADVICE = (
    "Use the table in every step, remove it, or freeze it with requires_grad_(False) before wrapping; or make it with "
    "sparse=False: for a sparse table that is unused, find_unused_parameters=True makes DDP raise."
)


def _top_module(name: str, missing: set[str], trainable: Sequence[str]) -> str:
    """The outermost module around `name` of which every trainable parameter is missing; `name` if there is none."""
    top = name
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:size]) + "."
        if all(other in missing for other in trainable if other.startswith(prefix)):
            top = prefix
    return top


def family_of(name: str, missing: set[str], trainable: Sequence[str]) -> str:
    """What is missing around `name`, the same for every block of a list: the layers that LayerDrop skips, say."""
    return ".".join("*" if part.isdigit() else part for part in _top_module(name, missing, trainable).split("."))


_CHANGES = {
    "replaced": "DDP keeps to {it} that {is_are} gone, and never averages the gradient of what stands there now",
    "removed": "DDP goes on waiting for {its} gradient",
    "frozen": "DDP goes on waiting for {its} gradient",
    "unfrozen": "DDP has not heard of {it}, and never averages {its} gradient",
    "cast or moved": "DDP's hooks are on the old {noun}, and {its} gradient is never averaged",
}


def judge_changed_in_forward(evidence: Sequence[StepEvidence], wrapper: WrapperFacts, names: Names) -> list[Finding]:
    """DDP503: parameters that a forward pass replaces, removes, freezes, unfreezes or casts after DDP has seen them."""
    if not wrapper.is_ddp:
        return []
    groups: dict[tuple[ParameterChange, int], dict[str, set[int]]] = {}
    first: dict[str, tuple[ParameterChange, int]] = {}
    for item in sorted(evidence, key=lambda item: item.step):
        for name, change in item.changed.items():
            idle = change.kind in ("removed", "frozen")  # nothing is lost where DDP looks who is unused
            if idle and (wrapper.tolerates_unused or not any(e.states.get(name) == "missing" for e in evidence)):
                continue
            key = first.setdefault(name, (change, item.step))
            groups.setdefault(key, {}).setdefault(name, set()).add(item.rank)
    world_size = len({item.rank for item in evidence})
    findings = []
    for (change, step), group in groups.items():
        subjects = names.subjects(list(group))
        ranks = tuple(sorted(set().union(*group.values())))
        words = {"it": plural_verb("the one", "those", subjects), "is_are": plural_verb("is", "are", subjects)}
        words |= {"its": plural_verb("its", "their", subjects), "noun": plural_verb("tensor", "tensors", subjects)}
        by = f" by {change.replacement}" if change.replacement else ""
        what = f"{plural_verb('was', 'were', subjects)} {change.kind}{by}"
        findings.append(
            make_finding(
                "DDP503",
                subjects,
                f"{join_names(subjects)} {what} in the forward pass of step {step}, after DDP had been constructed: "
                f"{_CHANGES[change.kind].format(**words)}.",
                ranks=unless_all(ranks, world_size),
                location=change.location or names.location(list(group)),
            )
        )
    return findings


@dataclass(frozen=True, slots=True)
class _MissingOn:
    """Parameters that did not contribute on the same ranks, in the same steps."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]


def _absences(group: Sequence[str], missing: Mapping[str, list[StepEvidence]]) -> list[_MissingOn]:
    places: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name in group:
        by_step: dict[int, list[int]] = {}
        for item in missing[name]:
            by_step.setdefault(item.step, []).append(item.rank)
        for step, ranks in by_step.items():
            places.setdefault((step, tuple(sorted(ranks))), []).append(name)
    together: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for (step, on_ranks), of_place in sorted(places.items()):
        together.setdefault((tuple(of_place), on_ranks), []).append(step)
    return [_MissingOn(of_names, on_ranks, tuple(steps)) for (of_names, on_ranks), steps in together.items()]


_MOST_ABSENCES = 6


def judge_sometimes(
    sometimes: Sequence[str],
    missing: Mapping[str, list[StepEvidence]],
    trainable: Sequence[str],
    world_size: int,
    steps: Sequence[int],
    wrapper: WrapperFacts,
    names: Names,
    *,
    ends_here: bool = True,
) -> list[Finding]:
    """One finding for each family of parameters that is missing here and there.

    Args:
        sometimes: Parameters that are missing somewhere, and not everywhere.
        missing: Where, by name.
        trainable: All parameters, in the order in which they are registered.
        world_size: How many ranks there are.
        steps: All that were run.
        wrapper: What the wrapper was told.
        names: How to speak of the parameters.
        ends_here: Whether the run ends with the last of these steps.
    """
    groups: dict[str, list[str]] = {}
    at_once = len({frozenset((item.rank, item.step) for item in missing[name]) for name in sometimes}) == 1
    whole = at_once and len(sometimes) == len(trainable) > 1  # the loss of an empty batch, say, which is a constant
    for name in sometimes:
        groups.setdefault("" if whole else family_of(name, set(sometimes), trainable), []).append(name)
    findings = []
    for group in groups.values():
        absences = _absences(group, missing)
        partial = [absence for absence in absences if len(absence.ranks) < world_size]
        subjects = names.subjects(group)
        facts = [
            f"{format_steps(absence.steps)}: {join_names(names.subjects(absence.names))} did not contribute on "
            f"{format_ranks(absence.ranks) if len(absence.ranks) < world_size else 'any rank'}"
            for absence in absences[:_MOST_ABSENCES]
        ]
        if len(absences) > _MOST_ABSENCES:
            facts.append(f"and so on ({len(absences) - _MOST_ABSENCES} more)")
        facts += _why_there(group, missing)
        ranks: tuple[int, ...] = ()
        absent_in = sorted({step for absence in absences for step in absence.steps})
        if partial:
            code = "DDP104"
            ranks = tuple(sorted({rank for absence in partial for rank in absence.ranks}))
            ranks = unless_all(ranks, world_size)
            step = min(min(absence.steps) for absence in partial)
            message = _told([absence for absence in partial if step in absence.steps], step, names)
            if whole:
                facts = [
                    "what the loss is made of there depends on no parameter, as a constant for an empty batch does"
                ]
                message = (
                    f"No parameter has a part in the loss of {format_ranks(partial[0].ranks)} in step "
                    f"{step}, while the "
                    "other ranks wait for the gradients."
                )
        else:
            code = "DDP513" if wrapper.static_graph else "DDP105"
            message = f"{join_names(subjects)} contributed in some steps only: not in {format_steps(absent_in)}."
            if len({absence.steps for absence in absences}) > 1:
                message = f"{join_names(subjects)} contributed in some steps only, each in steps of its own."
            if wrapper.is_ddp and not wrapper.tolerates_unused:
                facts.append(
                    f"plain DDP says nothing here, because no forward follows {format_steps(absent_in)}"
                    if ends_here and absent_in[0] == steps[-1]
                    else f"{AT_NEXT_FORWARD} after {format_steps(absent_in[:1])}"
                )
        sparse = [name for name in group if name in wrapper.sparse]
        if sparse and wrapper.find_unused_parameters:
            facts.append(SPARSE_REFUSED)
        if wrapper.static_graph:
            facts.append("static_graph=True promises that the set of used parameters never changes")
        findings.append(
            Finding(
                code=code,
                subjects=subjects,
                message=message,
                severity=RULES[code].severity,
                ranks=ranks,
                steps=unless_all(absent_in, len(steps)),
                location=names.location(group),
                evidence=tuple(facts),
                fix=SPARSE_ADVICE if sparse else "",
            )
        )
    return findings


def _told(absences: Sequence[_MissingOn], step: int, names: Names) -> str:
    """The first step in which ranks disagree, in a sentence."""
    parts = [
        f"{join_names(names.subjects(item.names))} did not contribute on {format_ranks(item.ranks)}"
        for item in absences
    ]
    if len(parts) == 1:
        return f"{parts[0]} in step {step}, while the other ranks wait for the gradient."
    more = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return f"In step {step} {parts[0]}, and {parts[1]}{more}: the ranks wait for each other's gradients."


def _why_there(group: Sequence[str], missing: Mapping[str, list[StepEvidence]]) -> list[str]:
    """Why the gradients of `group` were missing where they were, each reason once."""
    facts: dict[str, None] = {}
    for name in group:
        for end in dict.fromkeys(item.path_ends[name] for item in missing[name] if name in item.path_ends):
            at = f" at {end.location}" if end.location else ""
            if end.cause == "cut":
                facts[f"there the path is cut by {end.reason}{at}"] = None
            elif end.cause == "unreachable":
                facts[f"there the last use is {end.reason}{at}, which does not reach the loss"] = None
            elif end.cause == "unused":
                facts["there no operation of the forward pass reads " + ("it" if len(group) == 1 else "them")] = None
    return list(facts)[:3]
