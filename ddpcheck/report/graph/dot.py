"""A picture as dot source: modules as clusters, anomalous parameters coloured by cause, cuts as stop signs, a legend.

Names are data: what means something to dot or to its HTML-like labels is escaped, and control characters are shown.
The same picture gives the same text.
"""

from __future__ import annotations

import html
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import group_by, join_names, printable
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
_FONT = f'fontname="Helvetica,Arial,sans-serif" fontcolor="{INK}"'

# Attributes in the dot language
_GRAPH = f'{_FONT} bgcolor=white labeljust=l labelloc=t rankdir=TB nodesep=0.3 ranksep=0.35 pad=0.3 tooltip=" "'
_NODE = f'{_FONT} fontsize=11 shape=box style="rounded,filled" color="#8A8A8A" fillcolor=white height=0.3'
_NODE_MARGIN, _STOP_MARGIN = 'margin="0.12,0.05"', 'margin="0.05,0.02"'
_EDGE = 'color="#555555" arrowsize=0.6'
_PLAIN = 'fillcolor="#F4F4F4"'
_BOX = 'labeljust=l style="rounded,filled" color="#C4C4C4"'
_STOP_SIGN = f'shape=octagon style=filled color="{_STOP}" fillcolor="{_STOP_FILL}" fontcolor="{_STOP}" penwidth=2'
_MARKED = 'color="#000000" penwidth=1.5'
_DATA_ONLY = f'color="{FAINT}" style=dashed'


def draw(picture: GraphView, marks: Sequence[Mark], report: Report) -> str:
    """The dot source of a picture, with the anomalous parameters marked; the report is for the title."""
    return _Drawing(picture, marks, report).source()


@dataclass(slots=True)
class _Box:
    """What belongs to one module: lines of dot source, and the boxes of the modules in it, by path."""

    lines: list[str] = field(default_factory=list)
    inside: dict[str, _Box] = field(default_factory=dict)


class _Drawing:
    def __init__(self, picture: GraphView, marks: Sequence[Mark], report: Report) -> None:
        self.picture = picture
        self.report = report
        self.marks = _by_first_name(marks, picture.parameters)
        self.top = _Box()
        self.edges: list[str] = []
        self._ids: dict[str, str] = {}
        count = Counter(node.module for node in picture.nodes if node.module is not None)
        crowded = {module for module, number in count.items() if number > 1}
        self._crowded = crowded.union(*(prefixes(module)[:-1] for module in count))  # drawn as a box around their nodes

    def source(self) -> str:
        for node in self.picture.nodes:
            self._place(node.key, node.module, self._look(node))
        for edge in self.picture.edges:
            self._join(edge.source, edge.target, "" if edge.gradient else _DATA_ONLY)
        self._draw_parameters()
        head = (f"graph [{_GRAPH} label={self._title()}]", f"node [{_NODE} {_NODE_MARGIN}]", f"edge [{_EDGE}]")
        lines = [f"\t{line}" for line in (*head, *self._written(self.top, 0), *self.edges)]
        return "\n".join(["digraph ddpcheck {", *lines, "}\n"])

    # Nodes

    def _look(self, node: Node) -> str:
        if node.end is not None:
            at = f"at {node.end.location}" if node.end.location else ""
            lost = "does not reach the loss" if node.end.cause == "unreachable" else ""
            text = label([(node.end.reason, "b"), (at, "small"), (lost, "small")], colour=_STOP)
            return f"{_STOP_SIGN} {_STOP_MARGIN} label={text}"
        if node.name:  # also of many modules taken together
            shape = {"input": f"shape=cds {_PLAIN} ", "loss": f"shape=doubleoctagon {_PLAIN} "}.get(node.kind, "")
            return f"{shape}label={label([(node.name, 'b')])}"
        calls = [name if count == 1 else f"{name} \u00d7{count}" for name, count in node.operations.items()]
        called = ", ".join(calls if len(calls) <= 5 else [*calls[:4], f"{len(calls) - 4} more"])
        if node.module is None or node.module in self._crowded:  # what a container computes between its modules
            return f"{_PLAIN} label={label([(called or 'computes', 'small')])}"
        text = label([(self._called(node.module), "b"), (self._about(node.module), "small")])
        return f"label={text} tooltip={quoted(f'{node.module}: {called}')}"

    def _called(self, module: str) -> str:
        """The last part of a module's path, or the range of them where it stands for several."""
        if not module:
            return "model"
        copies = [path_parts(path)[-1] for path in self.picture.stands_for.get(module, (module,))]
        if len(copies) == 1:
            return copies[0]
        numbers = [int(name.strip("[]")) for name in copies if name.strip("[]").isdecimal()]
        consecutive = numbers == list(range(numbers[0], numbers[0] + len(copies))) if numbers else False
        return f"{copies[0]}{' ' if consecutive else f', {copies[1]}, '}… {copies[-1]}"

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
        """A node for those with which the same is wrong in one module, or, where these are many, in one box."""
        alike = group_by(self.marks, lambda name: (self.marks[name].code, self.marks[name].where, self._home(name)))
        nodes = [names for group in alike.values() for names in group_by(group, self._shown_module_of).values()]
        for names in nodes if len(nodes) <= MOST_NODES else alike.values():
            self._parameter_node(names, self.marks[names[0]])

    def _home(self, name: str) -> str | None:
        """The module in whose box the node of a parameter stands: around what reads it, else its own."""
        fact = self.picture.parameters.get(name)
        module = self._shown_module_of(name)
        if fact is None or not any(key in self._ids for key in fact.read_by):
            return self._outermost_never_called(module)
        return ".".join(path_parts(module)[:-1]) if module and module not in self._crowded else module

    def _shown_module_of(self, name: str) -> str:
        return self.picture.shown_as.get(module_of(name), module_of(name))

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
        look = f'{_MARKED} style=filled fillcolor="{cause.fill}" tooltip={quoted(", ".join(names))}'
        self._place(key, self._home(names[0]), f"{look} label={label(lines, colour=cause.text)}")
        readers = dict.fromkeys(reader for fact in facts if fact for reader in fact.read_by)
        for reader in readers:
            self._join(key, reader, _MARKED)
        if not any(reader in self._ids for reader in readers):
            for stop in sorted({fact.ends_at for fact in facts if fact and fact.ends_at}):
                self._join(key, stop, _MARKED)

    # Boxes

    def _place(self, key: str, module: str | None, look: str) -> None:
        self._ids[key] = f"n{len(self._ids) + 1}"
        box = self.top
        if module is not None:
            is_box = not module or module in self._crowded or not key.startswith("module ")
            for path in prefixes(module) if is_box else prefixes(module)[:-1]:
                box = box.inside.setdefault(path, _Box())
        box.lines.append(f"{self._ids[key]} [{look}]")

    def _written(self, box: _Box, depth: int) -> Iterator[str]:
        yield from box.lines
        for path, inner in box.inside.items():
            self._ids[f"box {path}"] = number = f"m{len(self._ids) + 1}"
            grey = max(0xFF - 7 * depth, 0xE0)
            fill = f"#{grey:02X}{grey:02X}{min(grey + 3, 255):02X}"
            heading = label([(self._called(path), "b"), (self._about(path), "small")], between="  ")
            yield f"subgraph cluster_{number} {{"
            yield f'\tgraph [{_BOX} fillcolor="{fill}" tooltip={quoted(path or "model")} label={heading}]'
            yield from (f"\t{line}" for line in self._written(inner, depth + 1))
            yield "}"

    def _join(self, source: str, target: str, look: str) -> None:
        if source in self._ids and target in self._ids:
            self.edges.append(f"{self._ids[source]} -> {self._ids[target]}" + (f" [{look}]" if look else ""))

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


def _row(text: str, *, fill: str = "", border: str = "") -> str:
    """A row of the title; one of the legend looks like what it explains."""
    look = f' BGCOLOR="{fill}" BORDER="1" COLOR="{border}"' if fill else ' BORDER="0"'
    return f'<TR><TD ALIGN="LEFT"{look}>{text}</TD></TR>'


def _by_first_name(marks: Iterable[Mark], parameters: Mapping[str, ParameterFact]) -> dict[str, Mark]:
    """One mark a parameter, whatever names of it the finding gives."""
    first = {alias: name for name, fact in parameters.items() for alias in fact.names}
    found: dict[str, Mark] = {}
    for mark in marks:
        found.setdefault(first.get(mark.parameter, mark.parameter), mark)
    return {name: found[name] for name in (*parameters, *found) if name in found}


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
    small = f'<FONT POINT-SIZE="9" COLOR="{FAINT if colour == INK else colour}">{{}}</FONT>'
    looks = {"b": "<B>{}</B>", "small": small, "": "{}"}
    written = [looks[style].format(text_in_label(line)) for line, style in lines if line]
    return f'<<FONT COLOR="{colour}">{between.join(written)}</FONT>>'


def text_in_label(text: str) -> str:
    """`text` within an HTML-like label."""
    return html.escape(printable(text).replace("\\", "\\\\")) or " "


def quoted(text: str) -> str:
    """`text` as an ordinary attribute that dot takes literally."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# Through the `dot` executable of Graphviz


def picture_format(path: str | None) -> str:
    """The format that the extension of `path` stands for, "dot", "svg" or "png"; dot source where there is no path.

    Raises:
        UsageError: The extension stands for none, or the `dot` executable that the format needs is not installed.
    """
    form = "dot" if path is None else PurePath(path).suffix.lower().lstrip(".")
    form = "dot" if form == "gv" else form
    if form not in ("dot", "svg", "png"):
        raise UsageError(f"cannot tell a picture's format from the name {path!r}: use .dot, .svg or .png")
    if form != "dot" and shutil.which("dot") is None:
        raise UsageError(
            f"{form.upper()} needs the `dot` executable of Graphviz, which is not on the PATH; install it "
            "(apt-get install graphviz, brew install graphviz), or write the source with -o graph.dot, which needs none"
        )
    return form


def lay_out(source: str, form: str, *, timeout: float) -> bytes:
    """The picture of dot source in a format that `picture_format` gives.

    Raises:
        UsageError: `dot` failed, or took longer than `timeout` seconds.
    """
    text = source.encode("utf-8", "backslashreplace")
    if form == "dot":
        return text
    try:
        done = subprocess.run(["dot", f"-T{form}"], input=text, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"dot did not lay out the picture within {timeout:g} s; pass a larger --timeout, or write the source with "
            "-o graph.dot"
        ) from error
    except OSError as error:
        raise UsageError(f"dot could not be run: {error.strerror or error}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"dot failed with exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout
