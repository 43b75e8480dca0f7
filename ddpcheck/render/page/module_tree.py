"""The modules of the model as a tree, with what findings say of them.

This module is light: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.wording import counted
from ddpcheck.render.page.frame import Content, Markup, code, folded, tag

_OPEN = 40  # modules up to which the whole tree stands there unfolded


@dataclass(slots=True)
class _Branch:
    """A module, those in it, the findings on it or on its own parameters, and the worst one in or below it."""

    entry: ModuleEntry
    inside: list[_Branch] = field(default_factory=list)
    told: dict[str, list[Finding]] = field(default_factory=dict)
    worst: Finding | None = None


def module_tree(report: Report) -> Content:
    """The tree; a module in which nothing is named by a finding is folded where there are many."""
    branches = {entry.name: _Branch(entry) for entry in report.modules}
    top = [branch for name, branch in branches.items() if _hung(name, branches)]
    for finding in sorted(report.findings, key=Finding.sort_key):
        for subject in finding.subjects:
            _tell(subject, finding, branches)
    unfolded = len(branches) <= _OPEN
    legend = [tag("span", word, class_=f"badge {word}") for word in ("error", "warning", "note")]
    intro = tag("p", "Marked where a finding names a module, its parameters or buffers: ", legend, class_="muted")
    return [intro, tag("ul", [_item(branch, unfolded) for branch in top], class_="tree")]


def _hung(name: str, branches: dict[str, _Branch]) -> bool:
    """Hang a module into the one that holds it; whether there is none."""
    holder = name
    while holder:
        holder = holder.rpartition(".")[0]
        if holder in branches:
            branches[holder].inside.append(branches[name])
            return False
    return True


def _tell(subject: str, finding: Finding, branches: dict[str, _Branch]) -> None:
    """Note a finding at the module that its subject is, or belongs to, if there is one."""
    holder = subject
    while holder not in branches or (holder == "" and subject and subject not in branches[""].entry.parameters):
        if not holder:
            return
        holder = holder.rpartition(".")[0]
    branches[holder].told.setdefault(subject[len(holder) :].lstrip("."), []).append(finding)
    while True:
        if holder in branches and branches[holder].worst is None:
            branches[holder].worst = finding  # the worst come first
        if not holder:
            return
        holder = holder.rpartition(".")[0]


def _item(branch: _Branch, unfolded: bool) -> Markup:
    entry = branch.entry
    name = entry.name.rpartition(".")[2] or "model"
    label: list[Content] = [code(name), " ", tag("span", entry.class_name, class_="muted")]
    if entry.elements:
        label.append(tag("span", f" · {entry.elements:,} in {', '.join(entry.parameters[:6])}", class_="muted"))
    for part, told in branch.told.items():
        for finding in {one.code: one for one in told}.values():
            kind = finding.severity.value
            text = f"{part}: {finding.code}" if part else finding.code
            label += [" ", tag("span", text, class_=f"badge {kind}")]
    if not branch.inside:
        return tag("li", tag("span", label, class_="leaf"))
    if branch.worst is not None and not branch.told:
        kind = branch.worst.severity.value
        label += [" ", tag("span", f"{kind} inside", class_=kind)]
    if not (unfolded or branch.worst):
        label.append(tag("span", f" · {counted(len(branch.inside), 'module')} inside", class_="muted"))
    inner = tag("ul", [_item(one, unfolded) for one in branch.inside])
    return tag("li", folded(label, inner, is_open=unfolded or branch.worst is not None))
