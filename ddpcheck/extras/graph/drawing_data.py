"""Graph of a loss as plain data, and folding of repeated modules."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import group_by

Mark = tuple[str, str]
"""(code of a parameter's finding, its ranks and steps as text or '' for all)"""


@dataclass(frozen=True, slots=True)
class Node:
    """Drawn node: batch, operations of one module, end of an autograd path, or loss."""

    key: str
    kind: Literal["input", "module", "stop", "loss"]
    module: str | None = None  # path of the enclosing module; "" for the model, None for the loss function
    operations: Counter[str] = field(default_factory=Counter)  # number of calls by the module itself, by name
    end: PathEnd | None = None  # only for kind "stop"


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """Class of a module, and numbers of parameter elements (with submodules) and forward calls."""

    class_name: str
    elements: int = 0
    calls: int = 0
    copies: tuple[str, ...] = ("",)  # paths of the folded modules, starting with the drawn module


@dataclass(frozen=True, slots=True)
class MarkedParam:
    """Drawn parameter (or trained tensor that is not registered) that has a finding."""

    mark: Mark
    module: str  # path of the drawn module with the parameter
    names: tuple[str, ...]  # all names of the parameter; the first is the name in DDP
    shape: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()  # keys of the nodes that read the parameter on rank 0


@dataclass(frozen=True, slots=True)
class GraphView:
    """Graph of the loss on rank 0 in the first step."""

    nodes: tuple[Node, ...]  # in order of execution
    edges: Mapping[tuple[str, str], bool]  # (source, target) -> True if a gradient flows back
    modules: Mapping[str, ModuleFact]  # by path
    parameters: tuple[MarkedParam, ...] = ()
    autograd: str = ""  # dot source of the autograd graph, or "" if not drawn


def prefixes(path: str) -> list[str]:
    """Return the module paths from the model ("") down to `path`."""
    return ["", *itertools.accumulate(path.split("."), "{}.{}".format)] if path else [""]


def module_of(name: str) -> str:
    """Return the path of the parent module of the parameter or module `name`."""
    return name.rpartition(".")[0]


FOLD_FROM = 24  # with at most this number of modules, all are drawn
MOST_MODULES = 80  # with more modules, the deepest are drawn as their parents
LEAST_COPIES = 3


def fold(
    modules: Mapping[str, Hashable], faults: Iterable[tuple[str, Hashable]] = (), cuts: Iterable[str] = ()
) -> dict[str, str]:
    """Map each module path to a module to draw, which may represent several modules.

    Consecutive equal siblings are drawn as one module. In a large model, deep modules are drawn as part of a parent.

    Args:
        modules: Facts by module path; equal modules have equal facts.
        faults: Pairs of module path and fault; equal modules have equal faults.
        cuts: Paths of modules in which autograd paths end; never merged into parents.
    """
    shown = {path: path for path in modules}
    if len(modules) <= FOLD_FROM:
        return shown
    content: dict[str, list[Hashable]] = defaultdict(list)  # facts and faults below each module
    for path, fact in (*modules.items(), *faults):
        for parent in prefixes(path):
            content[parent].append((path.removeprefix(parent), fact))
    for parent, children in group_by(filter(None, modules), module_of).items():
        for _, copies in itertools.groupby(children, key=lambda path: content[path]):
            group = list(copies)
            for path in group:
                target = group[0] if len(group) >= LEAST_COPIES else path
                shown[path] = shown.get(parent, parent) + target.removeprefix(parent)
    unmerged = {prefix for path in cuts for prefix in prefixes(path)}
    for depth in range(max(path.count(".") for path in modules), 0, -1):
        if len(set(shown.values())) > MOST_MODULES:
            for path, target in shown.items():
                shown[path] = next((p for p in prefixes(target)[depth:-1] if p not in unmerged), target)
    return shown


COLOURS: Mapping[str, str] = {code: rule.color for code, rule in RULES.items() if rule.color}
"""Fill of parameters by the code of their finding.

The palette of Okabe and Ito, distinguishable with any kind of color blindness (https://jfly.uni-koeln.de/color/). The
name of the rule is on every node as well.
"""


def colour(code: str) -> dict[str, str]:
    """Return the dot attributes of a parameter node for the rule `code`."""
    red, green, blue = bytes.fromhex(COLOURS[code][1:])
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 100  # brightness from 0 to 255 (ITU-R BT.601)
    return {"fillcolor": COLOURS[code], "fontcolor": "white" if is_dark else "black"}
