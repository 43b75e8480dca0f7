"""A picture as dot source: modules as clusters, anomalous parameters coloured by cause, cuts as stop signs, a legend.

Names are data: what means something to dot or to its HTML-like labels is escaped, and control characters are shown.
The same picture gives the same text.

This module is light: it never imports torch, and graphviz only to write dot source.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import join_names
from ddpcheck.report.graph.drawing_data import GraphView, Mark, Node, ParameterFact, module_of, path_parts, prefixes

MOST_LINES = 6  # names in one node
MOST_NODES = 16  # of anomalous parameters, one a module; more are put together


@dataclass(frozen=True, slots=True)
class Cause:
    """How an anomalous parameter is shown: the word on its node, what that means, and its colours."""

    word: str
    meaning: str
    fill: str
    text: str = "#000000"


# The fills are the palette of Okabe and Ito, which people with any kind of colour blindness can tell apart
# (https://jfly.uni-koeln.de/color/), and the word is on every node: no reader needs the colour.
CAUSES: Mapping[str, Cause] = {
    "DDP101": Cause("unused", "no operation of the forward pass reads it", "#E69F00"),
    "DDP102": Cause("non-contributing", "used, but what it made does not reach the loss", "#F0E442"),
    "DDP103": Cause("detached", "used, but its path to the loss is cut", "#D55E00"),
    "DDP104": Cause("rank-dependent", "contributes on some ranks only", "#0072B2", "#FFFFFF"),
    "DDP105": Cause("step-dependent", "contributes in some steps only", "#56B4E9"),
    "DDP106": Cause("unregistered", "trained, but no parameter of the wrapped module", "#009E73"),
    "DDP107": Cause("zero gradient", "its gradient is exactly zero", "#BBBBBB"),
    "DDP108": Cause("missing gradient", "backward reaches it and gives None", "#CC79A7"),
    "DDP110": Cause("uninitialised", "wrapped before it has a shape", "#000000", "#FFFFFF"),
    "DDP111": Cause("ignored", "trained, but the wrapper was told to ignore it", "#5D3A9B", "#FFFFFF"),
}

INK, FAINT = "#333333", "#767676"
_STOP, _STOP_FILL = "#B00020", "#FFF1F0"
_FONT = "Helvetica,Arial,sans-serif"


def draw(picture: GraphView, marks: Sequence[Mark], report: Report) -> str:
    """The dot source of a picture, with the anomalous parameters marked; the report is for the title."""
    return _Drawing(picture, marks, report).source()


class _Cluster:
    """A box around what belongs to one module."""

    def __init__(self) -> None:
        self.nodes: list[tuple[str, dict[str, str]]] = []
        self.inside: dict[str, _Cluster] = {}


class _Drawing:
    def __init__(self, picture: GraphView, marks: Sequence[Mark], report: Report) -> None:
        self.picture = picture
        self.report = report
        self.marks = _by_first_name(marks, picture.parameters)
        self.top = _Cluster()
        self.edges: list[tuple[str, str, dict[str, str]]] = []
        self._ids: dict[str, str] = {}
        count = Counter(node.module for node in picture.nodes if node.module is not None)
        crowded = {module for module, number in count.items() if number > 1}
        self._crowded = crowded.union(*(prefixes(module)[:-1] for module in count))  # drawn as a box around their nodes

    def source(self) -> str:
        """The whole text."""
        import graphviz

        for node in self.picture.nodes:
            self._draw_node(node)
        for edge in self.picture.edges:
            self._join(edge.source, edge.target, {} if edge.gradient else {"style": "dashed", "color": FAINT})
        self._draw_parameters()
        dot = graphviz.Digraph(
            "ddpcheck",
            graph_attr={
                "label": self._title(),
                "labelloc": "t",
                "labeljust": "l",
                "fontname": _FONT,
                "fontcolor": INK,
                "rankdir": "TB",
                "nodesep": "0.3",
                "ranksep": "0.35",
                "pad": "0.3",
                "bgcolor": "white",
                "tooltip": " ",
            },
            node_attr={
                "fontname": _FONT,
                "fontsize": "11",
                "fontcolor": INK,
                "color": "#8A8A8A",
                "shape": "box",
                "style": "rounded,filled",
                "fillcolor": "white",
                "height": "0.3",
                "margin": "0.12,0.05",
            },
            edge_attr={"color": "#555555", "arrowsize": "0.6"},
        )
        self._write(dot, self.top, None, 0)
        for source, target, attributes in self.edges:
            dot.edge(source, target, **attributes)
        return str(dot.source)

    # Nodes

    def _draw_node(self, node: Node) -> None:
        if node.kind in ("input", "loss"):
            shape = "cds" if node.kind == "input" else "doubleoctagon"
            attributes = {"shape": shape, "fillcolor": "#F4F4F4", "label": label([(node.name, "b")])}
        elif node.kind == "stop":
            attributes = _stop(node)
        else:
            attributes = self._module(node)
        self._place(node.key, node.module, attributes)

    def _module(self, node: Node) -> dict[str, str]:
        called = ", ".join(name if count == 1 else f"{name} \u00d7{count}" for name, count in _most(node.operations))
        if node.name:  # many modules taken together
            return {"label": label([(node.name, "b")])}
        if node.module is None or node.module in self._crowded:  # what a container computes between its modules
            return {"label": label([(called or "computes", "small")]), "fillcolor": "#F4F4F4"}
        lines = [(self._called(node.module), "b"), (self._about(node.module), "small")]
        return {"label": label(lines), "tooltip": attribute(f"{node.module}: {called}")}

    def _called(self, module: str) -> str:
        """The last part of a module's path, or the range of them where it stands for several."""
        if not module:
            return "model"
        copies = [path_parts(path)[-1] for path in self.picture.stands_for.get(module, (module,))]
        if len(copies) == 1:
            return copies[0]
        between = " " if _are_consecutive(copies) else f", {copies[1]}, "
        return f"{copies[0]}{between}… {copies[-1]}"

    def _about(self, module: str) -> str:
        fact = self.picture.modules.get(module)
        if fact is None:
            return ""
        copies = self.picture.stands_for.get(module, ())
        words = [f"{len(copies)} \u00d7 {fact.class_name}" if copies else fact.class_name]
        if fact.elements:
            words.append(_count(fact.elements, "parameter") + (" each" if copies else ""))
        if not fact.calls and not self._is_container(module):
            words.append("not called")
        elif fact.calls > 1:
            words.append(f"called {fact.calls} times")
        return " · ".join(words)

    def _is_container(self, module: str) -> bool:
        """A module that was not called holds one that was, as an `nn.ModuleList` does."""
        prefix = f"{module}." if module else ""
        return any(node.module is not None and node.module.startswith(prefix) for node in self.picture.nodes)

    # Parameters

    def _draw_parameters(self) -> None:
        groups = self._groups(lambda name: (self._home(name), self._shown_as(module_of(name))))
        if len(groups) > MOST_NODES:
            groups = self._groups(self._home)
        for names in groups.values():
            self._parameter_node(names, self.marks[names[0]])

    def _groups(self, place: Callable[[str], Hashable]) -> dict[Hashable, list[str]]:
        """The marked parameters that share a node: the same is wrong with them, and `place` is the same."""
        groups: dict[Hashable, list[str]] = {}
        for name, mark in self.marks.items():
            groups.setdefault((mark.code, mark.where, place(name)), []).append(name)
        return groups

    def _home(self, name: str) -> str | None:
        """The module in whose box the node of a parameter stands: around what reads it, else its own."""
        fact = self.picture.parameters.get(name)
        module = self._shown_as(module_of(name))
        if fact is None or not any(key in self._ids for key in fact.read_by):
            return self._outermost_never_called(module)
        return ".".join(path_parts(module)[:-1]) if module and module not in self._crowded else module

    def _shown_as(self, module: str) -> str:
        return self.picture.shown_as.get(module, module)

    def _outermost_never_called(self, module: str) -> str:
        for path in prefixes(module)[1:-1]:
            fact = self.picture.modules.get(path)
            if fact is not None and not fact.calls and not self._is_container(path):
                return path
        return module

    def _parameter_node(self, names: Sequence[str], mark: Mark) -> None:
        facts = [self.picture.parameters.get(name) for name in names]
        cause = CAUSES[mark.code]
        lines = [(cause.word, "b"), (mark.where, "small")]
        shown = names if len(names) <= MOST_LINES else names[: MOST_LINES - 1]
        for name, fact in zip(shown, facts, strict=False):
            shape = "\u00d7".join(map(str, fact.shape)) or "scalar" if fact else ""
            aliases = " = ".join(fact.names) if fact else name
            lines.append((f"{aliases}  {shape}".rstrip(), ""))
        if len(shown) < len(names):
            lines.append((f"and {len(names) - len(shown)} more", ""))
        key = f"parameter {names[0]}"
        line = {"color": "#000000", "penwidth": "1.5"}
        attributes = {"style": "filled", "fillcolor": cause.fill, "label": label(lines, colour=cause.text), **line}
        self._place(key, self._home(names[0]), {**attributes, "tooltip": attribute(", ".join(names))})
        readers = dict.fromkeys(reader for fact in facts if fact for reader in fact.read_by)
        for reader in readers:
            self._join(key, reader, line)
        if not any(reader in self._ids for reader in readers):
            for stop in sorted({fact.ends_at for fact in facts if fact and fact.ends_at}):
                self._join(key, stop, line)

    # Boxes

    def _place(self, key: str, module: str | None, attributes: dict[str, str]) -> None:
        self._ids[key] = f"n{len(self._ids) + 1}"
        cluster = self.top
        if module is not None:
            is_box = not module or module in self._crowded or not key.startswith("module ")
            for path in prefixes(module) if is_box else prefixes(module)[:-1]:
                cluster = cluster.inside.setdefault(path, _Cluster())
        cluster.nodes.append((self._ids[key], attributes))

    def _write(self, dot: Any, cluster: _Cluster, path: str | None, depth: int) -> None:
        for name, attributes in cluster.nodes:
            dot.node(name, **attributes)
        for inner_path, inner in cluster.inside.items():
            number = self._ids.setdefault(f"cluster {inner_path}", f"m{len(self._ids) + 1}")
            with dot.subgraph(name=f"cluster_{number}") as box:
                heading = label([(self._called(inner_path), "b"), (self._about(inner_path), "small")], between="  ")
                grey = max(0xFF - 7 * depth, 0xE0)
                box.attr(
                    "graph",
                    label=heading,
                    labeljust="l",
                    style="rounded,filled",
                    color="#C4C4C4",
                    fillcolor=f"#{grey:02X}{grey:02X}{min(grey + 3, 255):02X}",
                    tooltip=attribute(inner_path or "model"),
                )
                self._write(box, inner, inner_path, depth + 1)

    def _join(self, source: str, target: str, attributes: dict[str, str]) -> None:
        if source in self._ids and target in self._ids:
            self.edges.append((self._ids[source], self._ids[target], attributes))

    # Title and legend

    def _title(self) -> str:
        world = self.report.world
        facts = f"rank 0 of {world.get('world_size', 1)}, step 0"
        codes = dict.fromkeys(finding.code for finding in self.report.findings)
        marked = {mark.code for mark in self.marks.values()}
        found = [f"{code} {RULES[code].name}" + ("" if code in marked else " (not drawn)") for code in codes]
        rows = [
            _row(f'<FONT POINT-SIZE="16"><B>{text_in_label(self.report.target)}</B></FONT>'),
            _row(f'<FONT COLOR="{FAINT}">{text_in_label(facts)}</FONT>'),
            _row(text_in_label("findings: " + ", ".join(found) if found else "no findings")),
        ]
        for code in sorted(marked):
            cause = CAUSES[code]
            text = f"<B>{text_in_label(cause.word)}</B> {text_in_label(f'{cause.meaning} ({code})')}"
            rows.append(_row(f'<FONT COLOR="{cause.text}">{text}</FONT>', fill=cause.fill, border="#000000"))
        if any(node.kind == "stop" for node in self.picture.nodes):
            text = "<B>end of a path</B> what was computed before it gets no gradient through it"
            rows.append(_row(f'<FONT COLOR="{_STOP}">{text}</FONT>', fill=_STOP_FILL, border=_STOP))
        if any(not edge.gradient for edge in self.picture.edges):
            rows.append(_row(f'<FONT COLOR="{FAINT}">dashed arrow: data only, no gradient comes back</FONT>'))
        return f'<<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="2">{"".join(rows)}</TABLE>>'


def _stop(node: Node) -> dict[str, str]:
    assert node.end is not None
    at = f"at {node.end.location}" if node.end.location else ""
    lost = "does not reach the loss" if node.end.cause == "unreachable" else ""
    return {
        "shape": "octagon",
        "style": "filled",
        "fillcolor": _STOP_FILL,
        "color": _STOP,
        "fontcolor": _STOP,
        "penwidth": "2",
        "margin": "0.05,0.02",
        "label": label([(node.end.reason, "b"), (at, "small"), (lost, "small")], colour=_STOP),
    }


def _row(text: str, *, fill: str = "", border: str = "") -> str:
    """A row of the title; one of the legend looks like what it explains."""
    look = f' BGCOLOR="{fill}" BORDER="1" COLOR="{border}"' if fill else ' BORDER="0"'
    return f'<TR><TD ALIGN="LEFT"{look}>{text}</TD></TR>'


def _are_consecutive(names: Sequence[str]) -> bool:
    digits = [int(digit) for name in names if (digit := name.strip("[]")).isdecimal()]
    return len(digits) == len(names) and digits == list(range(digits[0], digits[0] + len(digits)))


def _by_first_name(marks: Iterable[Mark], parameters: Mapping[str, ParameterFact]) -> dict[str, Mark]:
    """One mark a parameter, whatever names of it the finding gives."""
    first = {alias: name for name, fact in parameters.items() for alias in fact.names}
    found: dict[str, Mark] = {}
    for mark in marks:
        found.setdefault(first.get(mark.parameter, mark.parameter), mark)
    return {name: found[name] for name in (*parameters, *found) if name in found}


def _most(operations: Mapping[str, int]) -> list[tuple[str, int]]:
    shown = list(operations.items())
    return shown if len(shown) <= 5 else [*shown[:4], (f"{len(shown) - 4} more", 1)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def summary(picture: GraphView, marks: Sequence[Mark], report: Report) -> str:
    """One line on what was drawn, and on what the report says of the parameters."""
    modules = {node.module for node in picture.nodes if node.kind == "module" and node.module is not None}
    drawn = _count(len(modules), "module")
    marked = _by_first_name(marks, picture.parameters)
    codes = join_names(sorted({mark.code for mark in marked.values()}), most=5)
    anomalous = _count(len(marked), "anomalous parameter") if marked else "no anomalous parameters"
    for check in report.checks:
        if check.name == "parameters" and check.status == "skipped" and not marked:
            anomalous = f"whether parameters are anomalous is not known ({check.detail})"
    return f"{drawn} drawn, {anomalous}{f' ({codes})' if codes else ''}"


# Text


def label(lines: Sequence[tuple[str, str]], *, colour: str = INK, between: str = '<BR ALIGN="CENTER"/>') -> str:
    """An HTML-like label: lines with a style each: "b" for bold, "small", or ""."""
    written = []
    for line, style in lines:
        if not line:
            continue
        text = text_in_label(line)
        if style == "b":
            text = f"<B>{text}</B>"
        elif style == "small":
            faint = FAINT if colour == INK else colour
            text = f'<FONT POINT-SIZE="9" COLOR="{faint}">{text}</FONT>'
        written.append(text)
    return f'<<FONT COLOR="{colour}">{between.join(written)}</FONT>>'


def text_in_label(text: str) -> str:
    """`text` within an HTML-like label."""
    return html.escape(_shown(text).replace("\\", "\\\\")) or " "


def attribute(text: str) -> str:
    """`text` as an ordinary attribute that dot takes literally; graphviz quotes it."""
    import graphviz

    escaped: str = graphviz.escape(_shown(text))  # of a class that keeps "<...>" from being taken for a label
    return escaped


def _shown(text: str) -> str:
    """`text` with what cannot be printed spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
