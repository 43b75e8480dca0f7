"""One finding a root cause: which findings are only consequences of which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ddpcheck.findings.report import Finding
from ddpcheck.judge.loss_terms import BY_NORMALISATION
from ddpcheck.judge.parameters import MADE_IN_FORWARD
from ddpcheck.judge.replica_state import RUNNING_STATISTICS


def split_consequences(findings: Sequence[Finding]) -> tuple[list[Finding], list[tuple[Finding, Finding]]]:
    """One finding a root cause, and each consequence with the finding that it is evidence of now."""
    kept: dict[int, Finding] = {}
    for number, finding in enumerate(findings):
        if not any(f.code == finding.code and set(finding.subjects) <= set(f.subjects) for f in kept.values()):
            kept[number] = finding
    consequences: dict[int, tuple[Finding, int]] = {}  # with the number of their cause
    for cause_codes, codes, applies in _CONSEQUENCES:
        first = next((number for number, f in kept.items() if f.code in cause_codes), None)
        if first is None:
            continue
        others = {number: f for number, f in kept.items() if f.code in codes and f.code not in cause_codes}
        for number, found in others.items():
            cause = kept[first]
            if not applies(cause, found):
                continue
            del kept[number]
            consequences[number] = found, first
            if found.code in ("DDP304", "DDP312", "DDP516") and cause.code in _ANOTHER_PROGRAM:
                continue  # where ranks run different programs, it goes without saying that their losses are others
            worst = min(cause.severity, found.severity, key=lambda severity: severity.rank)
            kept[first] = replace(
                cause,
                evidence=(*cause.evidence, f"with it comes {found.code}: {found.message}"),
                severity=worst if cause.code in ("DDP215", "DDP518") else cause.severity,
                tags=(*cause.tags, found.code),
            )

    def root(number: int) -> Finding:
        return kept[number] if number in kept else root(consequences[number][1])

    return list(kept.values()), [(found, root(first)) for found, first in consequences.values()]


def _always(_cause: Finding, _consequence: Finding) -> bool:
    return True


def _are_statistics(cause: Finding, consequence: Finding) -> bool:
    """Whether the buffers that differ are the running statistics of the layers that couple the samples."""
    return BY_NORMALISATION in cause.tags and all(
        name.rpartition(".")[2] in RUNNING_STATISTICS for name in consequence.subjects
    )


_ANOTHER_PROGRAM = frozenset({"DDP104", "DDP106"})

_GRADIENTS = ("DDP301", "DDP302", "DDP303", "DDP304", "DDP312", "DDP305")
_BY_RANK = ("DDP104", "DDP105", "DDP106", "DDP208", "DDP209", "DDP306", "DDP503", "DDP513", "DDP515")

_CONSEQUENCES: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Finding, Finding], bool]], ...] = (
    (("DDP106",), ("DDP515",), lambda cause, found: set(found.subjects) <= set(cause.subjects)),
    # where only the loss is known to differ on a rank, and not the data that it is computed from
    ((*_BY_RANK, "DDP214", "DDP215", "DDP216"), ("DDP516",), lambda _cause, found: found.subjects == ("loss",)),
    (("DDP304",), ("DDP214", "DDP215"), _are_statistics),
    (("DDP208",), (*_GRADIENTS, "DDP306"), _always),
    (("DDP309",), ("DDP303",), _always),
    (("DDP518",), ("DDP223", "DDP507", "DDP306"), _always),
    (("DDP223", "DDP301", "DDP501", "DDP507", "DDP508"), ("DDP306",), _always),
    (("DDP505", "DDP519"), ("DDP303", "DDP304", "DDP312", "DDP305"), _always),
    (("DDP502", "DDP509"), ("DDP301", "DDP302"), _always),
    (("DDP502",), ("DDP508",), lambda _cause, found: "step" in found.subjects),  # averaged backward passes are fewer
    (("DDP501",), ("DDP208", "DDP515"), _always),  # what ranks have trained apart was the same when it was wrapped
    (("DDP515",), ("DDP208", *_GRADIENTS, "DDP306"), _always),
    (("DDP311",), ("DDP214", "DDP215", "DDP302", "DDP304", "DDP312"), _always),
    (("DDP111",), ("DDP208", "DDP306", "DDP301"), _always),
    (("DDP222",), ("DDP301", "DDP302", "DDP304", "DDP312", "DDP305", "DDP214", "DDP215", "DDP216", "DDP516"), _always),
    (("DDP406",), ("DDP301", "DDP302"), _always),
    (("DDP104", "DDP105", "DDP513"), _GRADIENTS, _always),
    (("DDP503",), ("DDP101", "DDP102", "DDP103", "DDP106", *_GRADIENTS, "DDP306"), _always),
    # of parameters that were created after DDP had looked, every rank began with other values
    (("DDP106",), (*_GRADIENTS, "DDP306"), lambda cause, _found: MADE_IN_FORWARD in cause.tags),
    (("DDP112",), ("DDP301", "DDP302", "DDP406"), _always),
    (("DDP216",), ("DDP304", "DDP312", "DDP303"), _always),
    (("DDP214",), ("DDP304", "DDP312"), _always),
)
"""Codes of causes, codes of what comes with them, and whether one finding does with the other."""
