"""Merge findings with a common root cause, as `Rule.explains` defines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.rules import RULES, Explains
from ddpcheck.trace.losses import BY_NORMALISATION
from ddpcheck.trace.replicas import RUNNING_STATISTICS


@dataclass(frozen=True, slots=True)
class Causes:
    """Root causes of a list of findings."""

    findings: list[Finding]  # root causes, each with its consequences as evidence
    # for each input finding, its root cause (or the finding itself) in `findings`; `None` if an earlier finding of the
    # same rule has all of its subjects
    root_causes: list[Finding | None]


def find_causes(findings: Sequence[Finding]) -> Causes:
    """Group findings by root cause; drop a rule's repeated findings on the same subjects."""
    single: list[Finding] = []
    number_of: list[int | None] = []
    for finding in findings:
        is_known = any(f.code == finding.code and set(finding.subjects) <= set(f.subjects) for f in single)
        number_of.append(None if is_known else len(single))
        if not is_known:
            single.append(finding)
    causes = _find_cause_indices(single)
    kept = {number: finding for number, finding in enumerate(single) if number not in causes}
    roots = {number: number for number in kept}
    for number in causes:
        root = causes[number]
        while root in causes:
            root = causes[root]
        roots[number] = root
        effect, cause = single[number], kept[root]
        relation = _find_relation(cause, effect)
        if relation is None or relation.quietly:  # an indirect consequence, or not worth reporting
            continue
        worst = min(cause.severity, effect.severity, key=lambda severity: severity.rank)
        kept[root] = replace(
            cause,
            evidence=(*cause.evidence, f"with it comes {effect.code}: {effect.message}"),
            severity=worst if RULES[cause.code].takes_severity else cause.severity,
            tags=(*cause.tags, effect.code),
        )
    return Causes(list(kept.values()), [None if number is None else kept[roots[number]] for number in number_of])


def _find_cause_indices(findings: Sequence[Finding]) -> dict[int, int]:
    """Map indices of consequences to indices of their causes; prefer root causes."""
    possible: dict[int, list[int]] = {}
    for number, effect in enumerate(findings):
        explaining = [n for n, cause in enumerate(findings) if n != number and _is_cause_of(cause, effect)]
        if explaining:
            possible[number] = sorted(explaining, key=lambda n: findings[n].code)
    return {number: min(causes, key=lambda n: n in possible) for number, causes in possible.items()}


def _is_cause_of(cause: Finding, effect: Finding) -> bool:
    """Return True if the rule of `cause` explains `effect` (`Rule.explains`).

    If both rules explain each other, only the explanation with a condition other than "always" is valid.
    """
    relation, inverse = _find_relation(cause, effect), _find_relation(effect, cause)
    return relation is not None and (inverse is None or inverse.when == "always" != relation.when)


def _find_relation(cause: Finding, effect: Finding) -> Explains | None:
    return next(
        (rel for rel in RULES[cause.code].explains if effect.code in rel.codes and _is_met(rel.when, cause, effect)),
        None,
    )


def _is_met(when: str, cause: Finding, effect: Finding) -> bool:
    """Return True if condition `when` holds, or if `when` tags either finding."""
    return _CONDITIONS[when](cause, effect) if when in _CONDITIONS else when in cause.tags or when in effect.tags


_CONDITIONS: Mapping[str, Callable[[Finding, Finding], bool]] = {
    "always": lambda _cause, _effect: True,
    "an error": lambda cause, _effect: cause.severity is Severity.ERROR,
    "same subjects": lambda cause, effect: set(effect.subjects) <= set(cause.subjects),
    # the loss is known to differ between ranks, its input data is not
    "only the loss": lambda _cause, effect: effect.subjects == ("loss",),
    # running statistics of normalisation layers that couple samples
    "its statistics": lambda cause, effect: (
        BY_NORMALISATION in cause.tags and all(n.rpartition(".")[2] in RUNNING_STATISTICS for n in effect.subjects)
    ),
    "a note": lambda _cause, effect: effect.severity is Severity.NOTE,
    # found by the number of averaged backward passes in a step
    "by steps": lambda _cause, effect: "step" in effect.subjects,
    # raised by the ranks that read the truncated file
    "of a cut file": lambda cause, effect: "of a cut file" in effect.tags and {*cause.ranks} <= {*effect.ranks},
}


class ReportedCauses:
    """Findings reported so far, one per root cause."""

    def __init__(self, reported: Sequence[Finding] = ()) -> None:
        self.findings = list(reported)
        self.consequences: dict[str, Finding] = {}
        self._causes = set(map(finding_key, reported))

    def add(self, findings: Sequence[Finding], locate: Callable[[Finding], Finding]) -> list[Finding]:
        """Add findings whose cause is not yet reported, relocated by `locate`, and return them."""
        new: list[Finding] = []
        candidates = [*self.findings, *findings]
        for finding in findings:
            cause = finding_key(finding)
            is_known = cause in self._causes or is_reported_on_common_tensor(finding, self.findings)
            if not is_known and follows_from(finding, candidates):
                self.consequences.setdefault(finding.code, finding)
            elif not is_known:
                self._causes.add(cause)
                new.append(locate(finding))
        self.findings += new
        return new


def finding_key(finding: Finding) -> tuple[str, frozenset[str]]:
    """Return code and subjects as a key; with `Rule.conditional_use`, `*` replaces layer numbers."""
    subjects: Iterable[str] = finding.subjects
    if RULES[finding.code].conditional_use:
        subjects = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in subjects)
    return finding.code, frozenset(subjects)


def follows_from(finding: Finding, findings: Iterable[Finding]) -> bool:
    """Return True if an error in `findings` explains `finding`."""
    return any(c != finding and c.severity is Severity.ERROR and _is_cause_of(c, finding) for c in findings)


def is_reported_on_common_tensor(finding: Finding, reported: Iterable[Finding]) -> bool:
    """Return True if `finding` repeats its rule on a reported tensor (rules with `Rule.spreads`)."""
    subjects = set(finding.subjects)
    return RULES[finding.code].spreads and any(
        earlier.code == finding.code and subjects & set(earlier.subjects) for earlier in reported
    )
