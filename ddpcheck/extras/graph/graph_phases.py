"""Rank phases of `ddpcheck graph`: missing gradients and data flow in forward."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpcheck.extras.graph.drawing_data import GraphView, Mark, MarkedParam, ModuleFact, Node, colour, fold, module_of
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import frames_from, user_location
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.findings.wording import group_by
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, LossGraph, all_names, items_of
from ddpcheck.gather.autograd.gradient_paths import LEAVES_TORCH, TensorRecorder, cut_reason, function_name
from ddpcheck.gather.autograd.unregistered_leaves import reachable_tensors
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import repeated_step
from ddpcheck.gather.phases.model_build import build, wrap
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.steps.training_step import make_batch
from ddpcheck.recipe.pytree import copied, named_tensors, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss

STEP = 0


@dataclass(slots=True)
class _Frame:
    """Active call of a module or of the loss function."""

    module: str | None
    after: str = ""  # last submodule or cut before the running part of forward


class FlowRecorder(TensorRecorder):
    """Torch function mode that records the data flow between modules in forward."""

    def __init__(self, shown: Mapping[int, str], ends: Iterable[PathEnd] = ()) -> None:
        """Draw the modules in `shown` (path by `id(module)`), and stop nodes at `ends`."""
        super().__init__()  # `_known`: tensor -> (key of the source node, True if a gradient flows back)
        self.nodes = {"batch": Node("batch", "input")}  # by key, in order of execution
        self.edges: dict[tuple[str, str], bool] = {}  # (source, target) -> True if a gradient flows back
        self.readers: dict[int, dict[str, None]] = {}  # id(leaf) -> keys of the nodes that read the leaf
        self.calls: Counter[int] = Counter()  # number of forward calls by id(module)
        self._shown = shown
        self._ends = {path_end_key(end): end for end in ends}
        self._frames = [_Frame(None)]

    def record_forward(self, forward: Callable[[], Any], batch: Any) -> Any:
        """Run `forward` on `batch` while recording, and return the losses."""
        for tensor in tree_tensors(batch):
            self._known[tensor] = ("batch", False)
        with self:
            result = forward()
        for key, end in self._ends.items():  # ends that were not reached
            self.nodes.setdefault(key, Node(key, "stop", end.module, end=end))
        for name, loss in named_tensors(result, "loss"):
            if loss.requires_grad:
                self.nodes[name] = Node(name, "loss")
                self._add_edges(name, [loss])
        return result

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        parent = self._frames[-1]
        path = self._shown.get(id(module), parent.module)  # modules that are not drawn count for the parent
        self.calls[id(module)] += 1
        self._frames.append(parent if path == parent.module else _Frame(path))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        frame = self._frames.pop()
        unseen = [t for t in tree_tensors(output) if t not in self._known and not (t.is_leaf and t.requires_grad)]
        if unseen:  # created without a torch function call, e.g. in a scripted module
            key = self._node(frame).key
            self._add_edges(key, tree_tensors(inputs))
            self._known.update({tensor: (key, tensor.requires_grad) for tensor in unseen})
        if frame is not self._frames[-1]:
            self._frames[-1].after = f"module {frame.module}"

    @forwards_calls
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tree_tensors((args, kwargs)))
        required_grad = any(tensor.requires_grad for tensor in inputs)
        result = func(*args, **kwargs)
        name = function_name(func)
        outputs = [*tree_tensors(result), *tree_tensors(kwargs.get("out")), *inputs[: name == "__setitem__"]]
        if inputs and (outputs or name in LEAVES_TORCH):
            self._record(name, inputs, outputs, required_grad and not any(output.requires_grad for output in outputs))
        return result

    def _record(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], is_cut: bool) -> None:
        frame, operation = self._frames[-1], name.strip("_")
        reason = f"{operation}()" if outputs else f"{operation}(), which leaves torch"
        if outputs and is_cut:
            reason = cut_reason(name, outputs[0])
        key, hidden = path_end_key(PathEnd("", reason, user_location(), frame.module or "")), False
        end = self._ends.get(key)
        is_end = end is not None and (is_cut or not outputs or end.cause == "unreachable")
        if is_end:  # the stop node represents the operation
            frame.after = key
            self.nodes.setdefault(key, Node(key, "stop", frame.module, end=end))
        elif outputs:
            key = self._node(frame).key
            self.nodes[key].operations[operation] += 1
            tracked = (tensor.requires_grad or self._known.get(tensor, (key, False))[1] for tensor in inputs)
            hidden = not torch.is_grad_enabled() and any(tracked) and _in_custom_function()
        else:
            return
        self._add_edges(key, inputs)
        for output in outputs:
            self._known[output] = entry = (key, not is_end and (output.requires_grad or hidden))
            if name.endswith("_") and output._base is not None and any(output is tensor for tensor in inputs):
                self._known[output._base] = entry  # written in place through a view

    def _node(self, frame: _Frame) -> Node:
        key = f"{'loss function' if frame.module is None else f'module {frame.module}'} after {frame.after}"
        return self.nodes.setdefault(key, Node(key, "module", frame.module))

    def _add_edges(self, key: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self.readers.setdefault(id(tensor), {})[key] = None
            source, gradient = self._known.get(tensor, (key, False))
            if source != key:
                self.edges[source, key] = gradient or self.edges.get((source, key), False)


def path_end_key(end: PathEnd) -> str:
    """Return `Node.key` of the drawn node at which an autograd path ends."""
    return f"stop {end.reason} {end.location} {end.module}"


def _in_custom_function() -> bool:
    frames = (frame for frame in frames_from(sys._getframe(1)) if frame.f_code.co_name == "apply")
    return any(frame.f_globals.get("__name__") == "torch.autograd.function" for frame in frames)


def _modules_by_id(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Map `id(module)` to path and module, including modules in plain attributes."""
    modules = {id(submodule): (path, submodule) for path, submodule in module.named_modules()}
    for prefix, parent in module.named_modules():
        for key, value in vars(parent).items():
            path = f"{prefix}.{key}" if prefix else key
            for suffix, item in [] if key in MODULE_INTERNALS else [("", value), *items_of(value)]:
                for name, submodule in item.named_modules(prefix=path + suffix) if isinstance(item, nn.Module) else ():
                    modules.setdefault(id(submodule), (name, submodule))
    return modules


def prepare(target: str | Recipe, seed: int, *, wrapped: bool) -> None:
    """Build the model as in a check, and materialise lazy parameters.

    If `wrapped`, a model without lazy parameters is wrapped too, so that changes made by the wrapper are drawn.
    """
    is_lazy = bool(build(target, seed).uninitialised)
    state = rank_state()
    if is_lazy:
        batch = make_batch(state.recipe, STEP, seed=state.seed, world_size=state.world_size)
        shard = to_device(state.recipe.local_batch(batch, state.rank, state.world_size), state.device)
        for module in (state.module, state.reference.module):
            with torch.no_grad():
                call_loss(state.recipe, module, copied(shard), STEP)
    if not wrapped or is_lazy:
        state.recipe = replace(state.recipe, wrap=lambda module, _device: module)
    wrap()


def trace(marks: Mapping[str, Mark], *, autograd: bool = False) -> GraphView | None:
    """Run a step, explain missing gradients, and record the data flow in forward.

    Runs on every rank, since forward may communicate. With `autograd`, rank 0 also draws the autograd graph.

    Returns:
        The graph with the marked parameters on rank 0; `None` on other ranks.
    """
    state = rank_state()
    local.begin_step(STEP, None)
    local.local_step(STEP)
    ends: dict[str, PathEnd] = {}
    with contextlib.suppress(Exception):  # errors are in the report of the check
        ends = {name: end for name, end in repeated_step.explain(STEP).items() if end.cause in ("cut", "unreachable")}
    module, recipe = state.reference.module, state.recipe
    state.rewind()
    modules = _modules_by_id(module)
    infos = {path: (type(m).__name__, sum(p.numel() for p in m.parameters())) for path, m in modules.values()}
    faults: list[tuple[str, Hashable]] = [(module_of(name), (name.rpartition(".")[2], marks[name])) for name in marks]
    faults += [(end.module, (end.reason, str(end.location))) for end in ends.values()]
    shown = fold(infos, faults, [end.module for end in ends.values()])
    ends = {name: replace(end, module=shown.get(end.module, end.module)) for name, end in ends.items()}
    recorder = FlowRecorder({key: shown[path] for key, (path, _) in modules.items()}, ends.values())
    tensors = {name: tensor for name, _, tensor in reachable_tensors(module, recipe)}
    tensors |= nn.Module.named_parameters(module, remove_duplicate=False)
    source = ""

    def recorded_forward(model: nn.Module, batch: Any) -> Any:
        nonlocal source
        result = recorder.record_forward(lambda: call_loss(recipe, model, batch, STEP), batch)
        if autograd and state.rank == 0:
            source = draw_autograd(dict(named_tensors(result, "loss")), tensors, marks, ends)
        return result

    state.recipe = replace(recipe, loss=recorded_forward)
    state.run_loss(STEP, "drawing, ")
    if state.rank != 0:
        return None
    copies = group_by(shown, lambda path: (shown[path], module_of(path)))
    facts = {
        path: ModuleFact(*infos[path], recorder.calls[key], tuple(copies[path, module_of(path)]))
        for key, (path, _) in modules.items()
        if shown[path] == path
    }
    aliases, parameters = all_names(module), {}
    for name, mark in marks.items():
        tensor = tensors.get(name, torch.empty(()))  # if only other ranks have the tensor
        names = aliases.get(id(tensor), (name,))
        parent = shown.get(module_of(names[0]), module_of(names[0]))
        readers = recorder.readers.get(id(tensor)) or [path_end_key(ends[alias]) for alias in names if alias in ends]
        parameters[names] = MarkedParam(mark, parent, names, tuple(tensor.shape), tuple(readers))
    return GraphView(tuple(recorder.nodes.values()), recorder.edges, facts, tuple(parameters.values()), source)


MOST_NODES = 3_000  # Graphviz needs minutes for larger graphs
_FRAMES_PER_NODE = 4  # Python frames per node in the recursion of torchviz
_STOP = {"shape": "octagon", "color": "#B00020", "fillcolor": "#FFF1F0", "fontcolor": "#B00020"}
_ADDRESS = re.compile(r"\b\d{9,}\b")


def draw_autograd(
    losses: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    marks: Mapping[str, Mark],
    ends: Mapping[str, PathEnd],
) -> str:
    """Return dot source of the autograd graph of losses.

    Args:
        losses: Scalar losses, by name.
        tensors: Parameters and other trained leaf tensors, by name.
        marks: Code and ranks of the finding on a tensor, by name; tensors outside the graph are drawn too.
        ends: Ends of the autograd paths of tensors, by name.

    Raises:
        UsageError: The graph has more than `MOST_NODES` nodes.
    """
    from torchviz import make_dot

    count = len(LossGraph(losses.values(), limit=sys.maxsize).nodes)
    if count > MOST_NODES:
        raise UsageError(
            f"the autograd graph of the loss has {count:,} nodes, and --view autograd draws {MOST_NODES:,}: use --view "
            "modules, or a recipe with a smaller model"
        )
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _FRAMES_PER_NODE * count)
    try:
        graph = make_dot(tuple(losses.values()), params={**tensors, **losses})
    finally:
        sys.setrecursionlimit(limit)
    stops: dict[str, str] = {}
    for name, (code, where) in marks.items():
        tensor = tensors.get(name)
        key, shape = (name, "") if tensor is None else (str(id(tensor)), str(tuple(tensor.shape)))
        label = "\n".join(filter(None, (name, shape, f"{code} {RULES[code].name}", where)))
        graph.node(key, label, **colour(code))
        if end := ends.get(name):
            label = f"{end.reason}\nat {end.location}" if end.location else end.reason
            if label not in stops:
                stops[label] = f"stop{len(stops)}"
                graph.node(stops[label], label, **_STOP)
            graph.edge(key, stops[label], style="dashed")
    numbers: dict[str, str] = {}
    return _ADDRESS.sub(lambda match: numbers.setdefault(match[0], f"n{len(numbers)}"), str(graph.source))
