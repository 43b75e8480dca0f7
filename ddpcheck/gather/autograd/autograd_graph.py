"""Helpers for the autograd graph: reached parameters, and tensors of a module.

Two ways to ask, from cheap to expensive: the engine (`engine_answers`) and a walk (`LossGraph`).
`ddpcheck.gather.autograd.gradient_paths` finds out where a path is cut.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpcheck.findings.report import Location
from ddpcheck.findings.stacks import frames_of, innermost_line

WALK_LIMIT = 20_000
"""Most nodes of a `LossGraph`. Python objects for graph nodes live as long as the C++ graph, and freeing a chain of
50,000 walked nodes recurses past the default stack of 8 MB and ends the process; 30,000 are fine (measured on torch
2.13)."""


def gradient_node(tensor: torch.Tensor) -> Any:
    """Return the AccumulateGrad node of a leaf, or the `grad_fn` of a non-leaf.

    See https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.get_gradient_edge
    """
    return torch.autograd.graph.get_gradient_edge(tensor).node


class _NodeCollector(torch.autograd.Function):
    """Function whose node lists the gradient nodes of many inputs, for `gradient_nodes`; never differentiated."""

    @staticmethod
    def forward(_context: Any, *_tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise NotImplementedError


def gradient_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the `gradient_node` of each tensor; None for a tensor that requires no grad."""
    if not any(tensor.requires_grad for tensor in tensors):
        return [None] * len(tensors)
    with torch.enable_grad():
        output: Any = _NodeCollector.apply(*tensors)  # type: ignore[no-untyped-call]
    return [node for node, _ in output.grad_fn.next_functions]


def will_be_reached(nodes: Sequence[Any]) -> list[bool]:
    """Return True for each AccumulateGrad node that the running backward pass will execute.

    Call from a hook. All values are False under `torch.autograd.grad`, which returns gradients instead of accumulating
    them, so that torch raises.
    """
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return [False] * len(nodes)


def running_node() -> Any:
    """Return the autograd node that backward is executing, or None.

    Call inside a hook of the node. This also finds the root of the backward pass, which `will_be_reached` does not.
    """
    # Private to torch; needed to use a loss returned by forward.
    current_node = getattr(torch._C, "_current_autograd_node", None)
    return None if current_node is None else current_node()


def output_shapes(node: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the outputs of a node's operation; empty before torch 2.6."""
    return tuple(tuple(metadata.shape) for metadata in getattr(node, "_input_metadata", None) or ())


_engine: Any = torch.autograd.Variable._execution_engine
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Queue a function that the engine calls at the end of the running backward pass, after functions queued earlier.

Call from a hook or from a queued function. An exception of the function propagates out of the backward pass."""


def in_backward() -> bool:
    """Return True if this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Return True if the running backward pass keeps its graph (`retain_graph`).

    Call from a hook. Uses a private function of torch; False if this torch version does not have the function.
    """
    keeps = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return keeps is not None and bool(keeps())


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """Return the tensor that a node saved under `name`; None if unsafe to read.

    A tensor is unsafe to read if a hook packed the tensor (unpacking a checkpoint recomputes its forward), or if the
    tensor was overwritten or freed, so that torch raises.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    with contextlib.suppress(RuntimeError):
        tensor = getattr(node, f"_saved_{name}")
        return tensor if isinstance(tensor, torch.Tensor) else None
    return None


def in_compiled_backward() -> bool:
    """Return True if compiled autograd calls the running hook, so that `will_be_reached` is unusable."""
    # Private to torch: False if this torch version cannot tell.
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


def engine_answers(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> tuple[list[bool], RemovableHandle]:
    """Let a hook on `loss` ask the autograd engine which parameters backward will reach.

    Returns a list, which the hook fills with a boolean per parameter when backward starts, and the hook's handle.
    """
    reached: list[bool] = []

    def record_reached(_gradient: torch.Tensor) -> None:
        will_execute = torch._C._will_engine_execute_node
        reached[:] = [p.requires_grad and will_execute(gradient_node(p)) for p in parameters]

    return reached, loss.register_hook(record_reached)


class _Stop(Exception):
    """Raised to abort a backward pass before its first node."""


def reached_by(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return True for each parameter that backward of `loss` would reach; keep the graph."""
    if not loss.requires_grad:
        return [False] * len(parameters)
    if loss.is_leaf:
        return [parameter is loss for parameter in parameters]
    reached, handle = engine_answers(loss, parameters)

    def stop(_gradient: torch.Tensor) -> None:
        raise _Stop

    with handle, loss.register_hook(stop), contextlib.suppress(_Stop):
        torch.autograd.backward(loss, torch.zeros_like(loss), retain_graph=True)
    return reached


def node_of(tensor: torch.Tensor) -> Any:
    """Return `tensor.grad_fn`, or None if torch raises.

    torch raises for a view that was created under no_grad and whose base was modified in place afterwards.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


class LossGraph:
    """Autograd graph of tensors or nodes, walked up to a maximum number of nodes."""

    def __init__(
        self, roots: Iterable[Any], *, limit: int = WALK_LIMIT, is_end: Callable[[Any], bool] | None = None
    ) -> None:
        """Walk breadth first from `roots`, over `limit` nodes, not beyond `is_end` nodes."""
        roots = list(roots)
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        self._leaf_roots = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        starts = (node_of(root) if isinstance(root, torch.Tensor) else root for root in roots)
        self.nodes: list[Any] = list(dict.fromkeys(filter(None, starts)))
        self.ends: list[Any] = []  # nodes for which `is_end` holds
        self.is_complete = True  # False if the walk stopped at its limit
        seen = set(self.nodes)
        for node in self.nodes:  # grows during iteration
            if is_end is not None and is_end(node):
                self.ends.append(node)
                continue
            for child, _ in node.next_functions:
                if child is None or child in seen:
                    continue
                if len(self.nodes) < limit:
                    seen.add(child)
                    self.nodes.append(child)
                else:
                    self.is_complete = False

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that backward accumulates into."""
        accumulating = (node for node in self.nodes if node.name().endswith("AccumulateGrad"))
        variables = (getattr(node, "variable", None) for node in accumulating)
        leaves = (*self._leaf_roots, *(variable for variable in variables if variable is not None))
        return tuple({id(leaf): leaf for leaf in leaves}.values())

    @property
    def node_names(self) -> frozenset[str]:
        """Return the class names of the nodes, such as "AddmmBackward0"."""
        return frozenset(node.name() for node in self.nodes)

    @property
    def has_reentrant_checkpoint(self) -> bool:
        return any("CheckpointFunctionBackward" in name for name in self.node_names)

    @property
    def functions(self) -> list[Any]:
        """Return the nodes of custom autograd Functions."""
        return [node for node in self.nodes if hasattr(node, "_forward_cls")]

    @functools.cached_property
    def _parents(self) -> dict[Any, list[tuple[Any, int]]]:
        """Map each node to the (parent, input index) pairs from which gradients arrive."""
        parents: dict[Any, list[tuple[Any, int]]] = {}
        for node in self.nodes:
            for index, (child, _) in enumerate(node.next_functions):
                parents.setdefault(child, []).append((node, index))
        return parents

    def nearest(self, leaf: torch.Tensor, is_match: Callable[[Any, int], bool]) -> Iterator[Any]:
        """Yield the first node with `is_match(node, input_index)` on each path from `leaf` to roots."""
        target = gradient_node(leaf)
        pending, seen = [target], {target}
        while pending:
            for node, index in self._parents.get(pending.pop(), ()):
                if is_match(node, index):
                    yield node
                elif node not in seen:
                    seen.add(node)
                    pending.append(node)

    def nearest_functions(self, leaf: torch.Tensor) -> tuple[type[torch.autograd.Function], ...]:
        """Return the first custom autograd Function on each path from `leaf` to the roots."""
        nodes = self.nearest(leaf, lambda node, _index: hasattr(node, "_forward_cls"))
        return tuple(dict.fromkeys(node._forward_cls for node in nodes))


def record_lines() -> contextlib.AbstractContextManager[None]:
    """Let autograd nodes record their Python stack (anomaly mode without NaN check)."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def line_of(node: Any) -> Location | None:
    """Return the innermost user line that created `node`, if recorded by `record_lines`."""
    try:
        stack = node.metadata.get("traceback_", ())
    except Exception:  # nodes of a custom Function may have no metadata
        return None
    return Location.parse(innermost_line(frames_of("".join(stack))[::-1]))


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by name in DDP's order, a tied parameter by its first name."""
    return dict(module.named_parameters())


def all_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return every name of every parameter by `id`, including names of tied parameters."""
    names: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):  # bypass a user override
        names.setdefault(id(parameter), []).append(name)
    return {key: tuple(value) for key, value in names.items()}


MODULE_INTERNALS = frozenset(vars(nn.Module()))  # attributes set by `nn.Module` itself


_SEARCH_DEPTH = 4


def unregistered_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of tensors in attributes, containers and objects, except parameters and buffers."""
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
                yield from search_attributes(submodule, f"{name}.{inner}" if inner else name, depth + 1)
        else:
            for suffix, item in items_of(value):
                yield from search(item, f"{name}{suffix}", depth + 1)

    def search_attributes(holder: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        for key, item in list(vars(holder).items()):
            if key not in MODULE_INTERNALS:
                yield from search(item, f"{prefix}.{key}" if prefix else key, depth)

    for prefix, submodule in modules:
        yield from search_attributes(submodule, prefix, 0)


_MOST_ITEMS = 1000  # per container; skips the rest of e.g. a vocabulary
_LIBRARIES = ("torch.", "builtins", "numpy", "lightning.", "pytorch_lightning.")
"""Modules whose objects are not searched for tensors: a `LightningModule` refers to the `Trainer`, for example."""


def items_of(value: Any) -> list[tuple[str, Any]]:
    """Return (suffix, value) of the items or attributes of an object; suffixes: `[0]`, `.name`."""
    try:
        if isinstance(value, Mapping):
            return [(f"[{key!r}]", value[key]) for key in itertools.islice(value, _MOST_ITEMS)]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return [(f"[{index}]", item) for index, item in enumerate(itertools.islice(value, _MOST_ITEMS))]
        if type(value).__module__.startswith(_LIBRARIES):
            return []
        return [(f".{key}", item) for key, item in vars(value).items()]
    except Exception:  # user objects may raise anything
        return []


def unregistered_state(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the unregistered tensors of `module` that require no gradient."""
    return [(name, tensor) for name, tensor in state_tensors(module) if not tensor.requires_grad]


def state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `unregistered_tensors` that hold state, since no forward pass recomputes these tensors.

    Excludes results of operations on parameters, and the weight attribute that a forward pre-hook of
    `torch.nn.utils.weight_norm`, `spectral_norm` or `prune` recomputes.
    """
    recomputed_names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in _recomputed_attributes(submodule)
    }
    for name, tensor in unregistered_tensors(module):
        if tensor.is_leaf and name not in recomputed_names:
            yield name, tensor


def _recomputed_attributes(module: nn.Module) -> Iterator[str]:
    """Yield the attributes that torch's reparametrizations recompute before each forward of `module`."""
    for hook in module._forward_pre_hooks.values():  # no public list of hooks
        if type(hook).__module__.startswith("torch.nn.utils."):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            if isinstance(name, str):
                yield name
