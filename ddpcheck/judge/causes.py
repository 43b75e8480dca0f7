"""Merge findings with a common root cause, as `Rule.explains` defines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.rules.rule import Explains, When
from ddpcheck.judge.endings.rank_failure import OF_A_CUT_FILE
from ddpcheck.judge.gradients.loss_terms import BY_NORMALISATION
from ddpcheck.judge.gradients.single_process import ALL_MISSING
from ddpcheck.judge.loop.script_works import OF_GRADIENTS
from ddpcheck.judge.parameters.missing_parameters import MADE_IN_FORWARD
from ddpcheck.judge.replicas.replica_state import RUNNING_STATISTICS


@dataclass(frozen=True, slots=True)
class Causes:
    """Root causes of a list of findings."""

    findings: list[Finding]  # root causes, each with its consequences as evidence
    # for each input finding, its root cause (or the finding itself) in `findings`; `None` if an earlier one of the
    # same rule covers all of its subjects
    told_by: list[Finding | None]


def find_causes(findings: Sequence[Finding]) -> Causes:
    """Group findings by root cause; drop repeats of a rule on the same subjects."""
    single: list[Finding] = []
    number_of: list[int | None] = []
    for finding in findings:
        known = any(f.code == finding.code and set(finding.subjects) <= set(f.subjects) for f in single)
        number_of.append(None if known else len(single))
        if not known:
            single.append(finding)
    causes = _causes(single)
    kept = {number: finding for number, finding in enumerate(single) if number not in causes}
    roots = {number: number for number in kept}
    for number in causes:
        root = causes[number]
        while root in causes:
            root = causes[root]
        roots[number] = root
        found, cause = single[number], kept[root]
        how = _explains(cause, found)
        if how is None or how.quietly:  # an indirect consequence, or not worth reporting
            continue
        worst = min(cause.severity, found.severity, key=lambda severity: severity.rank)
        kept[root] = replace(
            cause,
            evidence=(*cause.evidence, f"with it comes {found.code}: {found.message}"),
            severity=worst if RULES[cause.code].takes_severity else cause.severity,
            tags=(*cause.tags, found.code),
        )
    return Causes(list(kept.values()), [None if number is None else kept[roots[number]] for number in number_of])


def _causes(findings: Sequence[Finding]) -> dict[int, int]:
    """Map explained findings to their causes by index, preferring unexplained causes."""
    possible: dict[int, list[int]] = {}
    for number, found in enumerate(findings):
        explaining = [n for n, cause in enumerate(findings) if n != number and _goes_before(cause, found)]
        if explaining:
            possible[number] = sorted(explaining, key=lambda n: findings[n].code)
    return {number: min(causes, key=lambda n: n in possible) for number, causes in possible.items()}


def _goes_before(cause: Finding, found: Finding) -> bool:
    """Check if `cause` explains `found`; if mutual, only the conditional direction counts."""
    how, back = _explains(cause, found), _explains(found, cause)
    return how is not None and (back is None or back.when == "always" != how.when)


def _explains(cause: Finding, found: Finding) -> Explains | None:
    return next(
        (one for one in RULES[cause.code].explains if found.code in one.codes and _WHEN[one.when](cause, found)), None
    )


_WHEN: Mapping[When, Callable[[Finding, Finding], bool]] = {
    "always": lambda _cause, _found: True,
    "an error": lambda cause, _found: cause.severity is Severity.ERROR,
    "same subjects": lambda cause, found: set(found.subjects) <= set(cause.subjects),
    # the loss is known to differ between ranks, its input data is not
    "only the loss": lambda _cause, found: found.subjects == ("loss",),
    # created after DDP's constructor ran, so initial values differ between ranks
    "made in forward": lambda cause, _found: MADE_IN_FORWARD in cause.tags,
    # running statistics of normalisation layers that couple samples
    "its statistics": lambda cause, found: (
        BY_NORMALISATION in cause.tags and all(name.rpartition(".")[2] in RUNNING_STATISTICS for name in found.subjects)
    ),
    "a note": lambda _cause, found: found.severity is Severity.NOTE,
    # fewer backward passes are averaged
    "by steps": lambda _cause, found: "step" in found.subjects,
    # every gradient is missing, none is zero
    "none is there": lambda _cause, found: ALL_MISSING in found.tags,
    "of gradients": lambda cause, _found: OF_GRADIENTS in cause.tags,
    # raised by the ranks that read the truncated file
    "of a cut file": lambda cause, found: OF_A_CUT_FILE in found.tags and {*cause.ranks} <= {*found.ranks},
}


# Findings reported earlier


class ReportedCauses:
    """Findings reported so far, one per root cause."""

    def __init__(self, reported: Sequence[Finding] = ()) -> None:
        self.findings = list(reported)
        self.consequences: dict[str, Finding] = {}
        self._causes = set(map(cause_of, reported))

    def add(self, findings: Sequence[Finding], locate: Callable[[Finding], Finding]) -> list[Finding]:
        """Add findings with a new cause, located by `locate`, and return them."""
        new: list[Finding] = []
        every = [*self.findings, *findings]
        for finding in findings:
            cause = cause_of(finding)
            known = cause in self._causes or goes_on(finding, self.findings)
            if not known and follows_from(finding, every):
                self.consequences.setdefault(finding.code, finding)
            elif not known:
                self._causes.add(cause)
                new.append(locate(finding))
        self.findings += new
        return new


def cause_of(finding: Finding) -> tuple[str, frozenset[str]]:
    """Return the key of a root cause; indices in names become '*' if `by_family`."""
    subjects: Iterable[str] = finding.subjects
    if RULES[finding.code].by_family:
        subjects = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in subjects)
    return finding.code, frozenset(subjects)


def follows_from(finding: Finding, findings: Iterable[Finding]) -> bool:
    """Check if `finding` is a consequence of an error in `findings`."""
    return any(
        other != finding and other.severity is Severity.ERROR and _goes_before(other, finding) for other in findings
    )


def goes_on(finding: Finding, reported: Iterable[Finding]) -> bool:
    """Check if `finding` extends a reported finding to more tensors."""
    subjects = set(finding.subjects)
    return RULES[finding.code].spreads and any(
        other.code == finding.code and subjects & set(other.subjects) for other in reported
    )
