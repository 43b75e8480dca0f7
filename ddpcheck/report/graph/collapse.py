"""Making a picture small enough to read: modules that are alike stand once, deep ones fold into what holds them.

Pure functions from `GraphView` to `GraphView`. This module is light: it never imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.findings.replace import replace
from ddpcheck.report.graph.drawing_data import Edge, GraphView, Mark, Node, module_of, path_parts, prefixes

FOLD_FROM = 24
"""Nodes up to which nothing is folded: such a picture is read as it is."""

MOST_NODES = 80
"""Nodes up to which modules are shown with what is inside them."""

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


@dataclass(slots=True)
class _Module:
    """A module of the tree that the paths span, with what was drawn of itself."""

    path: str
    own: list[Node] = field(default_factory=list)
    marks: list[tuple[str, ...]] = field(default_factory=list)
    inside: list[_Module] = field(default_factory=list)
    signature: Hashable = None


def _tree(picture: GraphView, marks: Sequence[Mark]) -> dict[str, _Module]:
    """All modules by path, each after the one that holds it."""
    modules = {"": _Module("")}

    def at(path: str) -> _Module:
        for holder, inner in itertools.pairwise(prefixes(path)):
            if inner not in modules:
                modules[inner] = _Module(inner)
                modules[holder].inside.append(modules[inner])
        return modules[path]

    for node in picture.nodes:
        if node.module is not None:
            at(node.module).own.append(node)
    for mark in marks:
        module = at(module_of(mark.parameter))
        module.marks.append((mark.parameter.removeprefix(f"{module.path}."), mark.code, mark.where))
    return modules


def _sign(modules: Mapping[str, _Module], picture: GraphView) -> None:
    """Give every module a signature: two that have the same are alike, whatever their own names are."""
    numbers: dict[Hashable, int] = {}  # so that a signature is as large as a module's own part of it
    for module in reversed(list(modules.values())):
        fact = picture.modules.get(module.path)
        own = tuple(
            (node.kind, tuple(sorted(node.operations.items())), node.end and (node.end.reason, node.end.location))
            for node in module.own
        )
        inner = tuple((path_parts(child.path)[-1], child.signature) for child in module.inside)
        about = (fact.class_name, fact.elements, fact.calls) if fact else None
        content = (about, own, tuple(sorted(module.marks)), inner)
        module.signature = numbers.setdefault(content, len(numbers))


def _runs(signatures: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Where a pattern repeats: (start, length of the pattern, how often), without overlap."""
    found = []
    start = 0
    while start < len(signatures):
        best = (0, 0)
        for period in range(1, _LONGEST_PERIOD + 1):
            pattern = signatures[start : start + period]
            end = start + period
            while signatures[end : end + period] == pattern and len(pattern) == period:
                end += period
            times = (end - start) // period
            if times >= _LEAST_COPIES and times * period > best[0] * best[1]:
                best = (period, times)
        if best[1]:
            found.append((start, *best))
        start += max(best[0] * best[1], 1)
    return found


@dataclass(frozen=True, slots=True)
class _Level:
    """One step on the way down to a module: the run that it is in, which copy of the pattern, and who stands for it."""

    run: str
    copy: int
    leader: str


def _alike(root: _Module) -> tuple[dict[str, _Level], dict[str, tuple[str, ...]]]:
    """The levels of modules in runs by path, and the modules that each leader stands for."""
    levels: dict[str, _Level] = {}
    stands_for: dict[str, tuple[str, ...]] = {}
    pending = [root]
    while pending:
        children = pending.pop().inside
        for start, period, times in _runs([child.signature for child in children]):
            for position in range(period):
                copies = [child.path for child in children[start + position : start + period * times : period]]
                stands_for[copies[0]] = tuple(copies)
                run = children[start].path
                levels |= {path: _Level(run, number, copies[0]) for number, path in enumerate(copies)}
        pending += [child for child in children if child.path not in levels or child.path in stands_for]
    return levels, stands_for


def _way(path: str, levels: Mapping[str, _Level]) -> list[_Level]:
    """The levels from the model down to `path`."""
    way = [_Level("", 0, "")]
    for part in path_parts(path):
        here = f"{way[-1].leader}.{part}" if way[-1].leader else part
        way.append(levels.get(here, _Level(here, 0, here)))
    return way


def _fold_alike(picture: GraphView, marks: Sequence[Mark]) -> GraphView:
    modules = _tree(picture, marks)
    _sign(modules, picture)
    levels, stands_for = _alike(modules[""])
    loops = _loops(picture)
    renamed: dict[str, str] = {}
    for path, module in modules.items():
        first = modules[_way(path, levels)[-1].leader]
        for node, shown in zip(module.own, first.own, strict=True):
            renamed[node.key] = loops.get(shown.key, shown.key)
    ways = {node.key: _way(node.module, levels) for node in picture.nodes if node.module is not None}

    def goes_on(edge: Edge) -> bool:
        """An edge leads from one copy of a pattern to another; the count says that already."""
        for one, other in zip(ways.get(edge.source, ()), ways.get(edge.target, ()), strict=False):
            if one != other:
                return one.run == other.run and one.copy != other.copy
        return False

    kept = replace(picture, edges=tuple(edge for edge in picture.edges if not goes_on(edge)))
    return replace(_merge(kept, renamed, lambda path: _way(path, levels)[-1].leader), stands_for=stands_for)


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
        if ends[0] != ends[1]:
            edges[ends] = edges.get(ends, False) or edge.gradient
    return replace(
        picture,
        nodes=tuple(nodes.values()),
        edges=tuple(Edge(*ends, gradient) for ends, gradient in edges.items()),
        parameters={
            name: replace(fact, read_by=tuple(dict.fromkeys(map(key_of, fact.read_by))), ends_at=key_of(fact.ends_at))
            for name, fact in picture.parameters.items()
        },
        shown_as={path: shown(picture.shown_as.get(path, path)) for path in picture.modules},
    )


# Deep modules


def _fold_deep(picture: GraphView) -> GraphView:
    """Fold the deepest modules until there are few enough nodes; those with a cut in them stay open."""
    cuts = [node.module for node in picture.nodes if node.kind == "stop" and node.module is not None]
    open_ones = {path for module in cuts for path in prefixes(module)}
    deepest = max((len(path_parts(node.module)) for node in picture.nodes if node.module), default=0)
    folded = picture
    for depth in range(deepest - 1, 0, -1):

        def shown(path: str, depth: int = depth) -> str:
            return next((prefix for prefix in prefixes(path)[depth:-1] if prefix not in open_ones), path)

        folded = _into(picture, shown)
        if len(folded.nodes) <= MOST_NODES:
            break
    return folded


def _into(picture: GraphView, shown: Callable[[str], str]) -> GraphView:
    """The picture with the nodes of a module, and what its holder computes, in the node of the one it is shown as."""
    modules = [(node.key, node.module) for node in picture.nodes if node.kind == "module" and node.module is not None]
    holders = {shown(path) for _, path in modules if shown(path) != path}
    renamed = {key: f"module {shown(path)}" for key, path in modules if shown(path) in holders}
    merged = _merge(picture, renamed, shown)
    whole = set(renamed.values())
    nodes = tuple(replace(node, operations={}) if node.key in whole else node for node in merged.nodes)
    return replace(merged, nodes=nodes)


def _take_together(picture: GraphView, marks: Sequence[Mark]) -> GraphView:
    """The last resort, for hundreds of modules side by side, all different: keep the ends and what is marked."""
    kept = {picture.shown_as.get(module_of(mark.parameter), "") for mark in marks}
    kept |= {node.module for node in picture.nodes if node.kind == "stop" and node.module is not None}
    plain = [node for node in picture.nodes if node.kind == "module" and node.module and node.module not in kept]
    middle = plain[_MOST_AT_ALL // 4 : len(plain) - _MOST_AT_ALL // 8]
    if not middle:
        return picture
    into = f"more {middle[0].key}"
    merged = _merge(picture, dict.fromkeys((node.key for node in middle), into), lambda path: path)
    number = len({node.module for node in middle})
    nodes = tuple(
        replace(node, name=f"{number:,} more modules", module="", operations={}) if node.key == into else node
        for node in merged.nodes
    )
    return replace(merged, nodes=nodes)
