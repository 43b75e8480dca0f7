"""The graph of a loss as plain data for `ddpcheck graph`, and which of its modules stand for others in a deep model."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.wording import group_by

Mark = tuple[str, str]
"""The code of a parameter's finding, and on which ranks or in which steps, if not on all."""


@dataclass(frozen=True, slots=True)
class Node:
    """The batch, a part of what a module computes, the end of a path, or a loss."""

    key: str
    kind: Literal["input", "module", "stop", "loss"]
    module: str | None = None  # path of the module around it: "" is the model, `None` the loss function
    operations: Counter[str] = field(default_factory=Counter)  # that the module itself calls
    end: PathEnd | None = None  # of a stop


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """A module: its class, its number of parameter elements with those inside it, and how often its forward ran."""

    class_name: str
    elements: int = 0
    calls: int = 0
    copies: tuple[str, ...] = ("",)  # paths of the modules that it stands for, itself the first


@dataclass(frozen=True, slots=True)
class MarkedParameter:
    """A parameter with a finding, or a tensor that is trained without being a parameter."""

    mark: Mark
    module: str  # path of the module that is drawn around it
    names: tuple[str, ...]  # all of its names, the first as DDP has it
    shape: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()  # keys of the nodes that read it on rank 0


@dataclass(frozen=True, slots=True)
class GraphView:
    """The graph of rank 0's loss in the first step."""

    nodes: tuple[Node, ...]  # in order of execution
    edges: Mapping[tuple[str, str], bool]  # by source and target, whether a gradient comes back
    modules: Mapping[str, ModuleFact]  # by path
    parameters: tuple[MarkedParameter, ...] = ()
    autograd: str = ""  # dot source of the autograd graph, if that is to be drawn


def prefixes(path: str) -> list[str]:
    """The paths of the modules from the model, which is "", down to `path` itself."""
    return ["", *itertools.accumulate(path.split("."), "{}.{}".format)] if path else [""]


def module_of(name: str) -> str:
    """The path of the module that holds the parameter or module `name`."""
    return name.rpartition(".")[0]


FOLD_FROM = 24  # modules up to which each is drawn: such a picture is read as it is
MOST_MODULES = 80  # above which modules are drawn without what is inside them
LEAST_COPIES = 3


def fold(
    modules: Mapping[str, Hashable], faults: Iterable[tuple[str, Hashable]] = (), cuts: Iterable[str] = ()
) -> dict[str, str]:
    """Say by path as which module each is drawn: several that are alike as the first, very deep ones as their holder.

    Args:
        modules: What each is, by path.
        faults: What is wrong in a module, after its path: modules are alike only if the same is wrong in them.
        cuts: The modules in which paths end; they are not folded into their holders.
    """
    shown = {path: path for path in modules}
    if len(modules) <= FOLD_FROM:
        return shown
    content: dict[str, list[Hashable]] = defaultdict(list)  # equal in modules that are alike
    for path, fact in (*modules.items(), *faults):
        for holder in prefixes(path):
            content[holder].append((path.removeprefix(holder), fact))
    for holder, inside in group_by(filter(None, modules), module_of).items():
        for _, copies in itertools.groupby(inside, key=lambda path: content[path]):
            alike = list(copies)
            for path in alike:
                first = alike[0] if len(alike) >= LEAST_COPIES else path
                shown[path] = shown.get(holder, holder) + first.removeprefix(holder)
    kept = {prefix for path in cuts for prefix in prefixes(path)}
    for depth in range(max(path.count(".") for path in modules), 0, -1):
        if len(set(shown.values())) > MOST_MODULES:
            for path, first in shown.items():
                shown[path] = next((p for p in prefixes(first)[depth:-1] if p not in kept), first)
    return shown


# The palette of Okabe and Ito, which people with any kind of colour blindness can tell apart
# (https://jfly.uni-koeln.de/color/), and the name of the rule is on every node: no reader needs the colour.
COLOURS: Mapping[str, str] = {
    "DDP101": "#E69F00",
    "DDP102": "#F0E442",
    "DDP103": "#D55E00",
    "DDP104": "#0072B2",
    "DDP105": "#56B4E9",
    "DDP106": "#009E73",
    "DDP107": "#BBBBBB",
    "DDP108": "#CC79A7",
    "DDP110": "#000000",
    "DDP111": "#5D3A9B",
}
DARK = ("DDP104", "DDP110", "DDP111")  # with white text


def colour(code: str) -> dict[str, str]:
    """Return the attributes of a node for a parameter with this finding."""
    return {"fillcolor": COLOURS[code], "fontcolor": "white" if code in DARK else "black"}
