"""Render a graph as Graphviz dot, with colored parameters and stop signs."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from graphviz import Digraph, escape, nohtml

from ddpcheck.extras.graph.drawing_data import GraphView, MarkedParam, ModuleFact, Node, colour, module_of, prefixes
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import group_by, join_names, plural, printable

MOST_LINES = 6  # parameter names in one node
MOST_PARAMETER_NODES = 16  # with more nodes, the parameters of several modules share a node
_TIMES = "\u00d7"
_FONT = {"fontname": "Helvetica,Arial,sans-serif", "fontsize": "11"}
_GRAPH = {**_FONT, "labeljust": "l", "labelloc": "t", "nodesep": "0.3", "ranksep": "0.35", "pad": "0.3"}
_NODE = {**_FONT, "shape": "box", "style": "rounded,filled", "fillcolor": "white", "height": "0.3"}
_EDGE = {"color": "#555555", "arrowsize": "0.6"}
_CLUSTER = {"style": "rounded,filled", "color": "#C4C4C4", "fillcolor": "#0000000A"}
_PLAIN = {"fillcolor": "#F4F4F4"}
_STOP = {"style": "filled", "color": "#B00020", "fillcolor": "#FFF1F0", "fontcolor": "#B00020", "margin": "0.05,0.02"}
_NODE_STYLES = {
    "input": {"shape": "cds", **_PLAIN},
    "loss": {"shape": "doubleoctagon", **_PLAIN},
    "stop": {"shape": "octagon", **_STOP},
}


def draw(view: GraphView, report: Report) -> str:
    """Return the dot source of a graph; equal input gives equal source."""
    title = _label_text(_title(view, report), end="\\l") + "\\l"
    if view.autograd:
        body = view.autograd.splitlines(keepends=True)[1:-1]  # without the braces
        return str(Digraph(graph_attr={**_GRAPH, "label": title}, body=body).source)
    return _Drawing(view).source(title)


class _Drawing:
    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.groups = _group(view.parameters, max((len(prefixes(each.module)) for each in view.parameters), default=0))
        count = Counter(node.module for node in view.nodes if node.kind == "module" and node.module is not None)
        clusters = {"", *(module for module, number in count.items() if number > 1)}  # other modules are single nodes
        clusters |= {module for module, _ in self.groups}
        clusters |= {node.module for node in view.nodes if node.kind == "stop" and node.module is not None}
        self.clusters = clusters.union(*(prefixes(module)[:-1] for module in (*count, *clusters)))
        self.ids: dict[str, int] = {}
        drawing = Digraph("ddpcheck", graph_attr=_GRAPH, node_attr=_NODE, edge_attr=_EDGE)
        self.content: dict[str | None, Digraph] = {None: drawing}  # subgraph by module path, in order of first nodes

    def source(self, title: str) -> str:
        for node in self.view.nodes:
            plain = _PLAIN if node.module is None or node.module in self.clusters else {}
            self._add(node.key, node.module, self._label(node), **_NODE_STYLES.get(node.kind, plain))
        edges = [(*ends, {} if gradient else {"style": "dashed"}) for ends, gradient in self.view.edges.items()]
        for (module, (code, where)), parameters in self.groups.items():
            names = [f"{' = '.join(each.names)}  {_TIMES.join(map(str, each.shape))}".rstrip() for each in parameters]
            more = f"and {len(names) - MOST_LINES} more" if len(names) > MOST_LINES else ""
            key = f"parameter {names[0]}"
            label = (RULES[code].name, where, *names[:MOST_LINES], more)
            self._add(key, module, label, style="filled", **colour(code))
            readers = dict.fromkeys(reader for parameter in parameters for reader in parameter.readers)
            edges += [(key, reader, {"penwidth": "1.5"}) for reader in readers]
        drawing = self._cluster(None)
        drawing.graph_attr["label"] = title
        for source, target, attrs in edges:
            begin, end = self.ids[source], self.ids[target]
            back = {"constraint": "false"} if begin > end and "penwidth" not in attrs else {}  # edge to a repeated node
            drawing.edge(f"n{begin}", f"n{end}", **attrs, **back)
        return str(drawing.source)

    def _add(self, key: str, module: str | None, label: Iterable[str], **look: str) -> None:
        self.ids[key] = number = len(self.ids) + 1
        parent = module if module is None or module in self.clusters else module_of(module)
        for path in prefixes(parent or ""):
            if path not in self.content:
                text = _label_text(["  ".join(filter(None, self._describe(path)))])
                self.content[path] = Digraph(f"cluster_{len(self.content)}", graph_attr={**_CLUSTER, "label": text})
        self.content[parent].node(f"n{number}", _label_text(label), **look)

    def _cluster(self, path: str | None) -> Digraph:
        """Return the subgraph of module `path`, or the whole drawing if `path` is None."""
        for child in self.content:
            if child is not None and path == (module_of(child) if child else None):
                self.content[path].subgraph(self._cluster(child))
        return self.content[path]

    def _label(self, node: Node) -> Sequence[str]:
        if node.end is not None:
            lost = "does not reach the loss" if node.end.cause == "unreachable" else ""
            return node.end.reason, f"at {node.end.location}" if node.end.location else "", lost
        if node.kind != "module":
            return (node.key,)
        if node.module is not None and node.module not in self.clusters:
            return self._describe(node.module)
        copies = math.prod(len(self._fact(path).copies) for path in prefixes(node.module or ""))
        calls = ((name, count // copies) for name, count in node.operations.items())
        return (join_names([f"{name} {_TIMES}{count}" if count > 1 else name for name, count in calls], most=5),)

    def _fact(self, path: str) -> ModuleFact:
        return self.view.modules.get(path, ModuleFact(""))

    def _describe(self, path: str) -> Sequence[str]:
        """Return the name of a drawn module, and its class, size and forward calls."""
        fact, copies = self._fact(path), len(self._fact(path).copies)
        names = [name.rpartition(".")[2] for name in (fact.copies[:: copies - 1] if copies > 1 else [path])]
        words = [f"{copies} {_TIMES} {fact.class_name}" if copies > 1 else fact.class_name]
        if fact.elements:
            words.append(f"{plural(f'{fact.elements:,}', 'parameter')}{' each' if copies > 1 else ''}")
        if fact.calls > 1:
            words.append(f"called {fact.calls} times")
        elif fact.class_name and not any(
            module.calls for child, module in self.view.modules.items() if path in prefixes(child)
        ):
            words.append("not called")
        return " \u2026 ".join(names) or "model", " \u00b7 ".join(words)


def _title(view: GraphView, report: Report) -> Iterator[str]:
    yield from (report.target, f"rank 0 of {report.world.get('world_size', 1)}, step 0")
    codes = {parameter.mark[0] for parameter in view.parameters}
    for code in dict.fromkeys(finding.code for finding in report.findings):
        yield f"{code} {RULES[code].name}: {RULES[code].summary if code in codes else 'not drawn'}"
    if not report.findings:
        yield "no findings"
    if any(node.kind == "stop" for node in view.nodes):
        yield "octagon: the end of a path; no gradient passes through it"
    if not view.autograd and not all(view.edges.values()):
        yield "dashed arrow: data only, no gradient flows back"


def _group(marked: Sequence[MarkedParam], depth: int) -> dict[tuple[str, tuple[str, str]], list[MarkedParam]]:
    """Group parameters by finding and module; use outer modules if groups are too many."""
    groups = group_by(marked, lambda parameter: (prefixes(parameter.module)[: depth + 1][-1], parameter.mark))
    return groups if depth == 0 or len(groups) <= MOST_PARAMETER_NODES else _group(marked, depth - 1)


def _label_text(lines: Iterable[str], end: str = "\\n") -> str:
    text: str = nohtml(end.join(escape(printable(line)).replace("&", "&amp;") for line in lines if line))
    return text


def summary(view: GraphView, report: Report) -> str:
    """Return one line on the drawn modules and the anomalous parameters."""
    modules = {node.module for node in view.nodes if node.kind == "module" and node.module is not None}
    codes = join_names(sorted({parameter.mark[0] for parameter in view.parameters}), most=5)
    marked = f"{plural(len(view.parameters), 'anomalous parameter')} ({codes})" if codes else "no anomalous parameters"
    for check in report.checks:
        if check.name == "parameters" and check.status == "skipped" and not codes:
            marked = f"it is not known which parameters are anomalous ({check.detail})"
    return f"{'autograd graph' if view.autograd else plural(len(modules), 'module')} drawn, {marked}"


def picture_format(path: str | None) -> str:
    """Return the picture format for the extension of `path`; "dot" by default.

    Raises:
        UsageError: The extension is unknown, or the `dot` executable required for the format is not installed.
    """
    form = PurePath(path or "graph.dot").suffix.lower().lstrip(".").replace("gv", "dot")
    if form not in ("dot", "svg", "png"):
        raise UsageError(f"cannot tell a picture's format from the name {path!r}: use .dot, .svg or .png")
    if form != "dot" and shutil.which("dot") is None:
        raise UsageError(
            f"{form.upper()} needs the `dot` executable of Graphviz, which is not on the PATH; install it "
            "(apt-get install graphviz, brew install graphviz), or write the source with -o graph.dot, which needs none"
        )
    return form


def lay_out(source: str, form: str, *, timeout: float) -> bytes:
    """Lay out dot source in a format of `picture_format`; return the picture.

    Raises:
        UsageError: `dot` failed, or took longer than `timeout` seconds.
    """
    text = source.encode("utf-8", "backslashreplace")
    if form == "dot":
        return text
    try:
        process = subprocess.run(["dot", f"-T{form}"], input=text, capture_output=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        way_out = "pass a larger --timeout, or write the source with -o graph.dot"
        raise UsageError(f"dot did not lay out the picture within {timeout:g} s ({error}); {way_out}") from error
    if process.returncode != 0:
        message = process.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise UsageError(f"dot failed with exit code {process.returncode}: {message}")
    return process.stdout
