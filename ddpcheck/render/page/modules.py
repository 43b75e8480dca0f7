"""The modules of the model as a tree, with what findings say of them.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.report import Finding, Report
from ddpcheck.render.parts import sorted_findings


@dataclass(slots=True)
class Branch:
    """A module, those in it, the findings on it or on its own parameters, and the worst one in or below it.

    Findings are by the part of the module that they name, and there by code.
    """

    entry: ModuleEntry
    inside: list[Branch] = field(default_factory=list)
    told: dict[str, dict[str, Finding]] = field(default_factory=dict)
    worst: Finding | None = None


def module_tree(report: Report) -> list[Branch]:
    """The modules that no other one holds."""
    branches = {entry.name: Branch(entry) for entry in report.modules}
    top: list[Branch] = []
    for name, branch in branches.items():
        holders = [branches[holder].inside for holder in _upwards(name) if holder in branches and holder != name]
        (holders or [top])[0].append(branch)
    for finding in sorted_findings(report):
        for subject in finding.subjects:
            held_by = [holder for holder in _upwards(subject) if holder in branches]
            if not held_by or (subject and held_by[0] == "" and subject not in branches[""].entry.parameters):
                continue
            part = subject[len(held_by[0]) :].lstrip(".")
            branches[held_by[0]].told.setdefault(part, {})[finding.code] = finding
            for holder in held_by:
                branches[holder].worst = branches[holder].worst or finding  # the worst come first
    return top


def _upwards(name: str) -> Iterator[str]:
    """A name, and those of all that hold it; the model itself is the last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
