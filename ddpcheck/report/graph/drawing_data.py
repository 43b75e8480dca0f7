"""The graph of a loss as plain data for `ddpcheck graph` to draw: modules, and tensors; and made small enough to read.

Modules that are alike stand once, deep ones fold into what holds them: pure functions from `GraphView` to `GraphView`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import group_by

NodeKind = Literal["input", "module", "loss", "stop"]


@dataclass(frozen=True, slots=True)
class Node:
    """One thing to draw."""

    key: str  # its identity within the picture
    # `module` is what a module itself computes (one part of it, where calls of other modules lie between), `stop` the
    # place where a path ends
    kind: NodeKind
    name: str = ""  # of the loss, or of many modules taken together; empty for a module, which is known by its path
    # path of the module in which it stands: "" is the model, `None` what the loss function does outside it
    module: str | None = None
    operations: Counter[str] = field(default_factory=Counter)  # what a module itself calls, with how often
    end: PathEnd | None = None  # why a path ends here, for a stop


@dataclass(frozen=True, slots=True)
class Edge:
    """Data that goes from one node to another; `gradient` tells whether a gradient comes back."""

    source: str
    target: str
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """A module: its class, its number of parameter elements with those inside it, and how often its forward ran."""

    class_name: str
    elements: int = 0
    calls: int = 0


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """A parameter, or a tensor that is trained without being one."""

    names: tuple[str, ...]  # all of its names, the first as DDP has it
    shape: tuple[int, ...]
    read_by: tuple[str, ...] = ()  # keys of the nodes that read it on rank 0
    ends_at: str = ""  # key of the stop at which its path ends, empty where there is none


@dataclass(frozen=True, slots=True)
class GraphView:
    """The graph of rank 0's loss in the first step."""

    nodes: tuple[Node, ...]  # in order of execution
    edges: tuple[Edge, ...]  # between their keys
    modules: Mapping[str, ModuleFact]  # by path, in order of registration
    parameters: Mapping[str, ParameterFact]  # by first name
    # the paths that a module of the picture stands for, where it is one of several alike
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # the module of the picture that a module is shown as, where that is not itself
    shown_as: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """A parameter that is not as it should be: the code of its finding, and on which ranks or in which steps."""

    parameter: str
    code: str
    where: str = ""


_DOT_OUTSIDE_BRACKETS = re.compile(r"\.(?![^\[\]]*\])")


def path_parts(path: str) -> list[str]:
    """The parts of a module's path: "blocks.0" has two, "blocks[0]" (an item of a plain list) one."""
    return _DOT_OUTSIDE_BRACKETS.split(path) if path else []


def prefixes(path: str) -> list[str]:
    """The paths of the modules from the model, which is "", down to `path` itself."""
    parts = path_parts(path)
    return [".".join(parts[:size]) for size in range(len(parts) + 1)]


def module_of(name: str) -> str:
    """The path of the module that holds the parameter `name`."""
    return ".".join(path_parts(name)[:-1])


FOLD_FROM = 24  # nodes up to which nothing is folded: such a picture is read as it is

MOST_NODES = 80  # nodes up to which modules are shown with what is inside them

_MOST_AT_ALL = 160
_LONGEST_PERIOD = 8
_LEAST_COPIES = 3


def fold(picture: GraphView, marks: Sequence[Mark]) -> GraphView:
    """A picture that a person can read.

    Modules of one holder that follow each other and are alike, in class, size, what they call and what is wrong with
    them, are shown once and counted. Where that is not enough, modules without a cut in them are folded into what
    holds them, the deepest first, and at last neighbours are taken together.
    """
    if len(picture.nodes) <= FOLD_FROM:
        return picture
    picture = _fold_alike(picture, marks)
    if len(picture.nodes) > MOST_NODES:
        picture = _fold_deep(picture)
    if len(picture.nodes) > _MOST_AT_ALL:
        picture = _take_together(picture, marks)
    return picture


# Modules that are alike


def _fold_alike(picture: GraphView, marks: Sequence[Mark]) -> GraphView:
    shown, stands_for = _alike(picture, marks)
    loops = _loops(picture)
    renamed = {}
    own = group_by(picture.nodes, lambda node: node.module)
    for module, nodes in own.items():
        for node, first in zip(nodes, nodes if module is None else own[shown[module]], strict=True):
            renamed[node.key] = loops.get(first.key, first.key)
    order = {n.key: place for place, n in enumerate(picture.nodes) if n.kind == "module" and n.key not in loops}

    def goes_on(edge: Edge) -> bool:
        """An edge leads from one copy of a pattern to the next; the count says that already."""
        source, target = renamed[edge.source], renamed[edge.target]
        back = source in order and target in order and order[source] > order[target]
        return back and (source, target) != (edge.source, edge.target)

    kept = replace(picture, edges=tuple(edge for edge in picture.edges if not goes_on(edge)))
    return replace(_merge(kept, renamed, lambda path: shown.get(path, path)), stands_for=stands_for)


def _alike(picture: GraphView, marks: Sequence[Mark]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The module as which each one is shown, and those that one stands for, where it is the first of several alike."""
    inside: dict[str, dict[str, None]] = {"": {}}  # by module, those that it holds; each after the one that holds it
    for path in (*(node.module or "" for node in picture.nodes), *(module_of(mark.parameter) for mark in marks)):
        for holder, inner in itertools.pairwise(prefixes(path)):
            inside[holder][inner] = None
            inside.setdefault(inner, {})
    signatures = _signatures(picture, marks, inside)
    first: dict[str, str] = {}
    stands_for: dict[str, tuple[str, ...]] = {}
    for held in map(list, inside.values()):
        for start, period, times in _runs([signatures[path] for path in held]):
            for place in range(start, start + period):
                copies = held[place : place + period * times : period]
                first |= dict.fromkeys(copies, copies[0])
                stands_for[copies[0]] = tuple(copies)
    shown = {"": ""}
    for holder, inner in ((holder, inner) for holder, held in inside.items() for inner in held):
        there = ".".join(filter(None, (shown[holder], path_parts(inner)[-1])))
        shown[inner] = first.get(there, there)
    return shown, {path: copies for path, copies in stands_for.items() if shown[path] == path}


def _signatures(
    picture: GraphView, marks: Sequence[Mark], inside: Mapping[str, Mapping[str, None]]
) -> dict[str, Hashable]:
    """By module; two that have the same are alike in class, size, what they call and what is wrong with them."""
    own = group_by(picture.nodes, lambda node: node.module)
    marked = group_by(marks, lambda mark: module_of(mark.parameter))
    numbers: dict[Hashable, int] = {}  # so that a signature is as large as a module's own part of it
    found: dict[str, Hashable] = {}
    for path in reversed(list(inside)):
        fact = picture.modules.get(path)
        content = (
            fact and (fact.class_name, fact.elements, fact.calls),
            *((n.kind, *n.operations.items(), n.end and (n.end.reason, n.end.location)) for n in own.get(path, ())),
            frozenset((path_parts(mark.parameter)[-1], mark.code, mark.where) for mark in marked.get(path, ())),
            *((path_parts(inner)[-1], found[inner]) for inner in inside[path]),
        )
        found[path] = numbers.setdefault(content, len(numbers))
    return found


def _runs(signatures: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Where a pattern repeats: (start, length of the pattern, how often), without overlap."""
    found = []
    start = 0
    while start < len(signatures):
        most = (1, 1)
        for period in range(1, _LONGEST_PERIOD + 1):
            pattern, times = signatures[start : start + period], 1
            while len(pattern) == period and pattern == signatures[start + times * period :][:period]:
                times += 1
            if times >= _LEAST_COPIES and times * period > most[0] * most[1]:
                most = (period, times)
        if most != (1, 1):
            found.append((start, *most))
        start += most[0] * most[1]
    return found


def _loops(picture: GraphView) -> dict[str, str]:
    """Nodes that repeat between a module's calls of others ("x = x + block(x)"), and the first of each group."""
    groups: dict[Hashable, list[str]] = {}
    for node in picture.nodes:
        if node.kind == "module":
            groups.setdefault((node.module, tuple(node.operations.items())), []).append(node.key)
    return {key: keys[0] for keys in groups.values() if len(keys) > _LEAST_COPIES for key in keys}


def _merge(picture: GraphView, renamed: Mapping[str, str], shown: Callable[[str], str]) -> GraphView:
    """The picture with its nodes renamed, of several with one name the first kept, and its modules shown as others."""

    def key_of(key: str) -> str:
        return renamed.get(key, key)

    nodes: dict[str, Node] = {}
    for node in picture.nodes:
        module = None if node.module is None else shown(node.module)
        nodes.setdefault(key_of(node.key), replace(node, key=key_of(node.key), module=module))
    edges: dict[tuple[str, str], bool] = {}
    for edge in picture.edges:
        ends = key_of(edge.source), key_of(edge.target)
        edges[ends] = edges.get(ends, False) or edge.gradient
    return replace(
        picture,
        nodes=tuple(nodes.values()),
        edges=tuple(Edge(*ends, gradient) for ends, gradient in edges.items() if ends[0] != ends[1]),
        parameters={
            name: replace(fact, read_by=tuple(dict.fromkeys(map(key_of, fact.read_by))), ends_at=key_of(fact.ends_at))
            for name, fact in picture.parameters.items()
        },
        shown_as={path: shown(picture.shown_as.get(path, path)) for path in picture.modules},
    )


def _emptied(picture: GraphView, keys: Container[str], **changes: Any) -> GraphView:
    """The picture with nodes that say no more what they call, and with other changes of them."""
    nodes = (replace(node, operations=Counter(), **changes) if node.key in keys else node for node in picture.nodes)
    return replace(picture, nodes=tuple(nodes))


# Deep modules


def _fold_deep(picture: GraphView) -> GraphView:
    """Fold the deepest modules until there are few enough nodes; those with a cut in them stay open."""
    paths = {node.key: node.module for node in picture.nodes if node.kind == "module" and node.module is not None}
    stops = [node.module for node in picture.nodes if node.kind == "stop" and node.module is not None]
    open_ones = {path for module in stops for path in prefixes(module)}
    folded = picture
    for depth in range(max((len(path_parts(path)) for path in paths.values()), default=0) - 1, 0, -1):

        def shown(path: str, depth: int = depth) -> str:
            return next((prefix for prefix in prefixes(path)[depth:-1] if prefix not in open_ones), path)

        holders = {shown(path) for path in paths.values() if shown(path) != path}
        renamed = {key: f"module {shown(path)}" for key, path in paths.items() if shown(path) in holders}
        folded = _emptied(_merge(picture, renamed, shown), {*renamed.values()})
        if len(folded.nodes) <= MOST_NODES:
            break
    return folded


def _take_together(picture: GraphView, marks: Sequence[Mark]) -> GraphView:
    """The last resort, for hundreds of modules side by side, all different: keep the ends and what is marked."""
    kept = {picture.shown_as.get(module_of(mark.parameter), "") for mark in marks}
    kept |= {node.module for node in picture.nodes if node.kind == "stop" and node.module is not None}
    plain = [node for node in picture.nodes if node.kind == "module" and node.module and node.module not in kept]
    middle = plain[_MOST_AT_ALL // 4 : len(plain) - _MOST_AT_ALL // 8]
    merged = _merge(picture, {node.key: "more modules" for node in middle}, lambda path: path)
    number = len({node.module for node in middle})
    return _emptied(merged, {"more modules"}, name=f"{number:,} more modules", module="")
