"""The autograd graph: parameters that backward reaches, and tensors that a module holds.

Two instruments, from cheap to dear: the engine's own answer (`EngineProbe`) and an iterative walk (`walk_graph`).
Where a path is cut, `ddpcheck.gather.autograd.gradient_paths` finds out.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.stacks import frames_of, location_of

WALK_LIMIT = 20_000
"""Nodes that `walk_graph` looks at. Python objects for graph nodes live as long as the C++ graph, and freeing a chain
of 50,000 walked nodes recurses past the default stack of 8 MB and ends the process; 30,000 are fine (measured on
torch 2.13)."""


def gradient_node(tensor: torch.Tensor) -> Any:
    """The node that accumulates into the leaf `tensor`, or that made the non-leaf `tensor`.

    See https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.get_gradient_edge
    """
    return torch.autograd.graph.get_gradient_edge(tensor).node


class _Nodes(torch.autograd.Function):
    """A function of tensors whose node names theirs; it is never differentiated."""

    @staticmethod
    def forward(_context: Any, *_tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise NotImplementedError


def gradient_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The `gradient_node` of each tensor, or `None` of one that requires no gradient: one call instead of many."""
    if not any(tensor.requires_grad for tensor in tensors):
        return [None] * len(tensors)
    with torch.enable_grad():
        made: Any = _Nodes.apply(*tensors)  # type: ignore[no-untyped-call]
    return [node for node, _ in made.grad_fn.next_functions]


def will_be_reached(nodes: Sequence[Any]) -> list[bool]:
    """Which `nodes`, of parameters, the backward pass that is running will execute.

    To be asked from a hook. Under `torch.autograd.grad` that is none of them: what is asked for is captured before its
    node, and the engine refuses to speak of that.
    """
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return [False] * len(nodes)


def running_node() -> Any:
    """The node that the backward pass is executing, in a hook on it; `None` where there is none, or nobody can tell.

    `will_be_reached` says no of it where the pass has begun there: the engine counts what is behind its root alone.
    """
    # Private to torch; without it, a loss that forward returns is no use.
    ask = getattr(torch._C, "_current_autograd_node", None)
    return None if ask is None else ask()


def made_shapes(node: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of what the operation of a graph's node has made; none where torch does not tell (before 2.6)."""
    return tuple(tuple(one.shape) for one in getattr(node, "_input_metadata", None) or ())


_engine: Any = torch.autograd.Variable._execution_engine
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Has a function called when the backward pass that is running ends, after what has been asked for before.

To be called from a hook, or from such a function. What the function raises comes out of the backward pass."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Whether the backward pass that runs keeps its graph, for another one that goes through it (`retain_graph`).

    To be asked from a hook. Private to torch: no, where this torch does not say.
    """
    asked = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return asked is not None and bool(asked())


def kept_tensor(node: Any, name: str) -> torch.Tensor | None:
    """What a node keeps for backward under this name, where it may be looked at.

    Not what hooks have packed: a checkpoint computes its forward once more to unpack it. Nor what was overwritten or
    freed, which is for backward to raise.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    with contextlib.suppress(RuntimeError):
        kept = getattr(node, f"_saved_{name}")
        return kept if isinstance(kept, torch.Tensor) else None
    return None


def in_compiled_backward() -> bool:
    """Whether this hook is called by compiled autograd: then the engine cannot be asked what it will reach.

    Private to torch: no, where this torch does not say.
    """
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


class EngineProbe:
    """Asks the autograd engine, at the start of a backward pass, which parameters it will reach.

    The question is asked from a hook on the loss, so before any gradient is computed and before the DDP reducer
    starts a collective.

    Attributes:
        reached: One bool a parameter once backward has started, `None` before.
    """

    def __init__(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self.reached: list[bool] | None = None
        self._parameters = list(parameters)
        if loss.requires_grad:
            loss.register_hook(self._ask)

    def _ask(self, _gradient: torch.Tensor) -> None:
        self.reached = _asked_now(self._parameters)


def _asked_now(parameters: Iterable[torch.Tensor]) -> list[bool]:
    return [p.requires_grad and torch._C._will_engine_execute_node(gradient_node(p)) for p in parameters]


class _Stop(Exception):
    """Ends a backward pass before its first node."""


def reached_by(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Which `parameters` the backward pass of `loss` would reach, without running it and without freeing its graph."""
    if not loss.requires_grad:
        return [False] * len(parameters)
    if loss.is_leaf:
        return [parameter is loss for parameter in parameters]
    reached: list[bool] = []

    def ask(_gradient: torch.Tensor) -> None:
        reached.extend(_asked_now(parameters))
        raise _Stop

    with loss.register_hook(ask), contextlib.suppress(_Stop):
        torch.autograd.backward(loss, torch.zeros_like(loss), retain_graph=True)
    return reached


@dataclass(frozen=True, slots=True)
class GraphWalk:
    """The result of an iterative walk."""

    leaves: tuple[torch.Tensor, ...]  # into which backward accumulates
    node_names: frozenset[str]  # names of the node classes, for example "AddmmBackward0"
    complete: bool  # False when the walk stopped at its limit
    size: int  # number of nodes that it met
    functions: tuple[Any, ...] = ()  # nodes of custom autograd Functions
    ends: tuple[Any, ...] = ()  # nodes behind which it was not to go


def node_of(tensor: torch.Tensor) -> Any:
    """The node of a tensor in the autograd graph; `None` for one that has none, or that torch refuses to speak of.

    It does so for a view that was made under no_grad, and whose base was written in place since then.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def walk_graph(
    roots: Iterable[torch.Tensor],
    *,
    nodes: Iterable[Any] = (),
    not_behind: Callable[[Any], bool] = lambda _node: False,
    limit: int = WALK_LIMIT,
) -> GraphWalk:
    """Walk the autograd graph behind `roots`, and behind graph `nodes`, iteratively, up to `limit` nodes."""
    roots = list(roots)
    leaves = {id(root): root for root in roots if root.requires_grad and root.is_leaf}
    names: set[str] = set()
    functions: list[Any] = []
    ends: list[Any] = []
    size = 0
    for node in nodes_behind([*map(node_of, roots), *nodes], limit + 1, lambda node: not not_behind(node)):
        size += 1
        if size > limit:
            break
        name = node.name()
        names.add(name)
        if not_behind(node):
            ends.append(node)
        elif name.endswith("AccumulateGrad"):
            if (variable := getattr(node, "variable", None)) is not None:
                leaves[id(variable)] = variable
        elif hasattr(node, "_forward_cls"):
            functions.append(node)
    complete, size = size <= limit, min(size, limit)
    return GraphWalk(tuple(leaves.values()), frozenset(names), complete, size, tuple(functions), tuple(ends))


def nodes_behind(roots: Iterable[Any], most: int, goes_on: Callable[[Any], bool] = lambda _node: True) -> Iterator[Any]:
    """Graph nodes and those behind them, the nearest first, up to so many; behind none for which it does not go on."""
    pending = list(dict.fromkeys(root for root in roots if root is not None))
    seen = set(pending)
    for node in pending:  # which grows
        yield node
        for following, _ in node.next_functions if goes_on(node) else ():
            if following is not None and following not in seen and len(pending) < most:
                seen.add(following)
                pending.append(following)


Parents = dict[Any, list[tuple[Any, int]]]
"""By node of a graph, the nodes that hand it a gradient, each with the index of the input that it stands at."""


def parents_behind(roots: Iterable[Any]) -> Parents:
    """The edges of the graph behind graph nodes, as far as it has up to `WALK_LIMIT` nodes."""
    parents: Parents = {}
    for node in nodes_behind(roots, WALK_LIMIT):
        for index, (following, _) in enumerate(node.next_functions):
            if following is not None:
                parents.setdefault(following, []).append((node, index))
    return parents


def nearest_above(leaf: torch.Tensor, parents: Parents, is_end: Callable[[Any, int], bool]) -> Iterator[Any]:
    """The last nodes for which `is_end` holds (with an index of an input) on the ways of a gradient to `leaf`."""
    target = gradient_node(leaf)
    pending, seen = [target], {target}
    while pending:
        for node, index in parents.get(pending.pop(), ()):
            if is_end(node, index):
                yield node
            elif node not in seen:
                seen.add(node)
                pending.append(node)


def functions_before(roots: Iterable[Any], leaf: torch.Tensor) -> tuple[type[torch.autograd.Function], ...]:
    """The custom autograd Functions that stand last on the ways of a gradient from graph nodes to `leaf`."""
    last = nearest_above(leaf, parents_behind(roots), lambda node, _index: hasattr(node, "_forward_cls"))
    return tuple(dict.fromkeys(node._forward_cls for node in last))


@contextlib.contextmanager
def recorded_lines() -> Iterator[None]:
    """A block whose operations keep the line that called them (torch's anomaly mode, without its check for NaN)."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def line_of(node: Any) -> Location | None:
    """The innermost line of the user's code that made `node`, where `recorded_lines` has kept it."""
    try:
        stack = node.metadata.get("traceback_", ())
    except Exception:  # nodes of a custom Function need not have any
        return None
    return Location.parse(location_of(frames_of("".join(stack))[::-1]))


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their first name, as DDP orders them; ties are listed once."""
    return dict(module.named_parameters())


def all_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Every name of every parameter, by identity: `named_parameters` hides the second name of a tied one."""
    names: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):  # not an override of the user's
        names.setdefault(id(parameter), []).append(name)
    return {key: tuple(value) for key, value in names.items()}


MODULE_INTERNALS = frozenset(vars(nn.Module()))  # attributes that `nn.Module` itself sets


_SEARCH_DEPTH = 4


def unregistered_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that `module` holds without having registered them: plain attributes, lists of layers, helper objects."""
    modules = list(module.named_modules())
    registered = {id(t) for t in (*module.parameters(), *module.buffers())} | {id(m) for _, m in modules}
    seen: set[int] = set()

    def search(value: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if depth > _SEARCH_DEPTH or id(value) in registered or id(value) in seen:
            return
        if isinstance(value, str | bytes | int | float | bool | type | type(None)):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not value.is_nested:
                yield name, value
        elif isinstance(value, nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                if id(tensor) not in registered and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{name}.{inner}", tensor
            for inner, submodule in value.named_modules():
                yield from attributes(submodule, f"{name}.{inner}" if inner else name, depth + 1)
        else:
            for suffix, item in contents(value):
                yield from search(item, f"{name}{suffix}", depth + 1)

    def attributes(holder: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        for key, item in list(vars(holder).items()):
            if key not in MODULE_INTERNALS:
                yield from search(item, f"{prefix}.{key}" if prefix else key, depth)

    for prefix, submodule in modules:
        yield from attributes(submodule, prefix, 0)


_MOST_ITEMS = 1000  # of a container; a vocabulary is no list of layers
_LIBRARIES = ("torch.", "builtins", "numpy", "lightning.", "pytorch_lightning.")
"""Whose objects are no part of a model: a `LightningModule` holds the `Trainer`, and that the run."""


def contents(value: Any) -> list[tuple[str, Any]]:
    """Items or attributes of an object that is no tensor or module, with how Python writes each; empty if unknown."""
    try:
        if isinstance(value, Mapping):
            return [(f"[{key!r}]", value[key]) for key in itertools.islice(value, _MOST_ITEMS)]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return [(f"[{index}]", item) for index, item in enumerate(itertools.islice(value, _MOST_ITEMS))]
        if type(value).__module__.startswith(_LIBRARIES):
            return []
        return [(f".{key}", item) for key, item in vars(value).items()]
    except Exception:  # foreign objects may answer anything
        return []


def unregistered_state(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors without gradient that `module` holds without having registered them."""
    return [(name, tensor) for name, tensor in held_state(module) if not tensor.requires_grad]


def held_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Of `unregistered_tensors`, those that are state: neither made by a forward pass nor made again before each.

    What an operation on parameters has made is no state. Neither is the weight that `torch.nn.utils.weight_norm`,
    `spectral_norm` and `prune` keep as an attribute: a hook of theirs computes it before each forward pass.
    """
    made_again = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in _recomputed_attributes(submodule)
    }
    for name, tensor in unregistered_tensors(module):
        if tensor.is_leaf and name not in made_again:
            yield name, tensor


def _recomputed_attributes(module: nn.Module) -> Iterator[str]:
    """The attributes that torch's own reparametrisations compute before each forward pass of `module`."""
    for hook in module._forward_pre_hooks.values():  # there is no public list of hooks
        if type(hook).__module__.startswith("torch.nn.utils."):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            if isinstance(name, str):
                yield name
