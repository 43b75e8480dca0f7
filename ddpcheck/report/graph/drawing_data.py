"""The graph of a loss as plain data: modules, and the tensors that flow between them, for `ddpcheck graph` to draw."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddpcheck.findings.evidence.parameters import PathEnd

NodeKind = Literal["input", "module", "loss", "stop"]


@dataclass(frozen=True, slots=True)
class Node:
    """One thing to draw.

    Attributes:
        key: Its identity within the picture.
        kind: `module` is what a module itself computes (one part of it, where calls of other modules lie between),
            `stop` the place where a path ends.
        name: Of the loss, or of many modules taken together; empty for a module, which is known by its path.
        module: Path of the module in which it stands: "" is the model, `None` what the loss function does outside it.
        operations: What a module itself calls, with how often.
        end: Why a path ends here, for a stop.
    """

    key: str
    kind: NodeKind
    name: str = ""
    module: str | None = None
    operations: Counter[str] = field(default_factory=Counter)
    end: PathEnd | None = None


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
    """A parameter, or a tensor that is trained without being one.

    Attributes:
        names: All of its names, the first as DDP has it.
        shape: Its shape.
        read_by: Keys of the nodes that read it on rank 0.
        ends_at: Key of the stop at which its path ends, empty where there is none.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    read_by: tuple[str, ...] = ()
    ends_at: str = ""


@dataclass(frozen=True, slots=True)
class GraphView:
    """The graph of rank 0's loss in the first step.

    Attributes:
        nodes: In order of execution.
        edges: Between their keys.
        modules: By path, in order of registration.
        parameters: By first name.
        stands_for: The paths that a module of the picture stands for, where it is one of several alike.
        shown_as: The module of the picture that a module is shown as, where that is not itself.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    modules: Mapping[str, ModuleFact]
    parameters: Mapping[str, ParameterFact]
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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
