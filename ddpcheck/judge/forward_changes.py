"""DDP503: changes that a forward pass makes to the parameters after DDP has been constructed.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import ParameterChange, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, join_names, make_finding, plural_verb, unless_all

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
