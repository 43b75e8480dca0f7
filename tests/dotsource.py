"""A strict reader of the dot language, as far as ddpcheck writes it; what it does not know is an error."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

TOKEN = re.compile(r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[\w.#-]*\w)|(?P<mark>->|[{}\[\]=]))', re.S)


@dataclass
class Dot:
    """Nodes by identifier with their attributes and the clusters around them, edges, and the label of each cluster."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    around: dict[str, tuple[str, ...]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    clusters: dict[str, str] = field(default_factory=dict)
    title: str = ""

    def labels(self) -> list[str]:
        return [node["label"] for node in self.nodes.values()]

    def node(self, words: str) -> str:
        """The one node whose label has `words` in it."""
        (found,) = [name for name, attributes in self.nodes.items() if words in attributes["label"]]
        return found

    def clusters_of(self, name: str) -> list[str]:
        return [self.clusters[cluster] for cluster in self.around[name]]


def tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        assert match and match.lastgroup, f"no token at {text[at : at + 40]!r}"
        kind, at = match.lastgroup, match.end()
        value = match[kind]
        if kind == "string":
            value = plain(value[1:-1])
        found.append((kind, value))
    return found


def plain(quoted: str) -> str:
    """The text that dot shows of a quoted string."""
    assert not re.search(r"[\x00-\x1f]", quoted)
    assert not re.search(r"&(?!\w+;)", quoted), "an ampersand that dot would take for an entity"

    def unescaped(match: re.Match[str]) -> str:
        assert match[1] in '"\\nl', "a backslash that dot would take for an escape"
        return "\n" if match[1] in "nl" else match[1]

    return html.unescape(re.sub(r"\\(.)", unescaped, quoted)).removesuffix("\n")


def parse(text: str) -> Dot:
    stream = tokens(text)
    dot = Dot()
    at = 0

    def take(expected: str = "") -> str:
        nonlocal at
        value = stream[at][1]
        assert not expected or stream[at] in (("mark", expected), ("word", expected)), (expected, stream[at : at + 3])
        at += 1
        return value

    def attributes() -> dict[str, str]:
        found = {}
        take("[")
        while stream[at] != ("mark", "]"):
            key = take()
            take("=")
            found[key] = take()
        take("]")
        return found

    def block(around: tuple[str, ...]) -> None:
        take("{")
        while stream[at] != ("mark", "}"):
            name = take()
            assert re.fullmatch(r"\w+", name), name
            if name == "subgraph":
                inner = take()
                assert inner.startswith("cluster_") and inner not in dot.clusters
                dot.clusters[inner] = ""
                block((*around, inner))
            elif stream[at] == ("mark", "->"):
                take("->")
                target = take()
                dot.edges.append((name, target, attributes() if stream[at] == ("mark", "[") else {}))
            else:
                found = attributes()
                if name == "graph" and around:
                    dot.clusters[around[-1]] = found["label"]
                elif name == "graph":
                    dot.title = found["label"]
                elif name not in ("node", "edge"):
                    assert name not in dot.nodes
                    dot.nodes[name], dot.around[name] = found, around
        take("}")

    take("digraph")
    take()
    block(())
    assert at == len(stream)
    assert {end for edge in dot.edges for end in edge[:2]} <= set(dot.nodes), "an edge of a node that is not there"
    return dot
