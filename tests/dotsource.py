"""A strict reader of the dot language, as far as ddpcheck writes it; what it does not know is an error."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

STATEMENT = re.compile(r"(\w+)(?: -> (\w+))?(?: \[(.*)\])?")
ATTRIBUTE = re.compile(r'\s*(\w+)=(?:"((?:[^"\\]|\\.)*)"|([\w.#-]+))')


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
        (name,) = [name for name, attributes in self.nodes.items() if words in attributes["label"]]
        return name

    def clusters_of(self, name: str) -> list[str]:
        return [self.clusters[cluster] for cluster in self.around[name]]


def plain(quoted: str) -> str:
    """The text that dot shows of a quoted string."""
    assert not re.search(r"[\x00-\x1f]", quoted)
    assert not re.search(r"&(?!\w+;)", quoted), "an ampersand that dot would take for an entity"

    def unescaped(match: re.Match[str]) -> str:
        assert match[1] in '"\\nl', "a backslash that dot would take for an escape"
        return "\n" if match[1] in "nl" else match[1]

    return html.unescape(re.sub(r"\\(.)", unescaped, quoted)).removesuffix("\n")


def parse(text: str) -> Dot:
    dot = Dot()
    around: list[str] = []
    first, *lines, last, end = text.split("\n")
    assert first.startswith("digraph") and (last, end) == ("}", "")
    for line in map(str.strip, lines):
        if line == "}":
            around.pop()
        elif cluster := re.fullmatch(r"subgraph (cluster_\d+) \{", line):
            assert cluster[1] not in dot.clusters
            around.append(cluster[1])
            dot.clusters[cluster[1]] = ""
        else:
            match = STATEMENT.fullmatch(line)
            assert match and not ATTRIBUTE.sub("", match[3] or "").strip(), line
            look = {key: word or plain(quoted) for key, quoted, word in ATTRIBUTE.findall(match[3] or "")}
            if match[2]:
                dot.edges.append((match[1], match[2], look))
            elif match[1] == "graph" and around:
                dot.clusters[around[-1]] = look["label"]
            elif match[1] == "graph":
                dot.title = look["label"]
            elif match[1] not in ("node", "edge"):
                assert match[1] not in dot.nodes
                dot.nodes[match[1]], dot.around[match[1]] = look, tuple(around)
    assert not around and {end for edge in dot.edges for end in edge[:2]} <= set(dot.nodes)
    return dot
