"""What ranks gather for `ddpcheck graph`: why gradients are missing, and the data flow between modules in forward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.tracebacks import passes_on
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, all_names, contents
from ddpcheck.gather.autograd.gradient_paths import LEAVES_TORCH, TensorRecorder, cut_reason, function_name
from ddpcheck.gather.autograd.unregistered_leaves import held_tensors
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import repeated_step
from ddpcheck.gather.phases.model_build import build, wrap
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.steps.training_step import make_batch
from ddpcheck.recipe.pytree import copied, named_tensors, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.graph.drawing_data import Edge, GraphView, ModuleFact, Node, ParameterFact

INPUT = "batch"


@dataclass(slots=True)
class _Made:
    """The origin of a tensor."""

    by: str  # the node that made it
    stop: str = ""  # the stop that lies behind it, if one does
    off: bool = False  # whether it was made from what requires grad while autograd was off


@dataclass(slots=True)
class _Frame:
    module: str | None
    registered: str = ""  # the innermost registered module around it
    part: int = 0  # of its forward, counted by the calls and cuts that lie between

    @property
    def key(self) -> str:
        return f"{'loss function' if self.module is None else f'module {self.module}'} {self.part}"


class FlowRecorder(TensorRecorder):
    """While active, follows every tensor from the module that made it to those that read it, in one forward pass.

    Attributes:
        read_by: The nodes that read each leaf that requires grad, by its identity.
        leaves: Those leaves.
    """

    def __init__(self, module: nn.Module, ends: Sequence[PathEnd] = ()) -> None:
        """`ends` are where paths are known to end."""
        super().__init__()
        self.read_by: dict[int, dict[str, None]] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._registered = {id(submodule) for submodule in module.modules()}
        self._modules = _named_modules(module)
        self._stops = {stop_key(end): end for end in ends}
        self._met: dict[str, str | None] = {}  # the modules in which they were met
        self._reasons = {end.reason for end in ends}
        self._nodes = {INPUT: Node(INPUT, "input", name="batch")}
        self._flows: dict[tuple[str, str], set[str]] = {}
        self._frames = [_Frame(None)]
        self._revived: set[str] = set()

    def enter_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors are the batch."""
        self._known.update({tensor: _Made(INPUT) for tensor in tensors})

    def module_facts(self) -> dict[str, ModuleFact]:
        """The modules by path."""
        return {
            path: ModuleFact(type(module).__name__, sum(p.numel() for p in module.parameters()), self._calls[path])
            for path, module in self._modules.values()
        }

    def graph(self, losses: Mapping[str, torch.Tensor]) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
        """What was seen: the nodes in order of execution, and the edges between them."""
        pending = list(self._revived)
        while pending:
            reached = pending.pop()
            for (source, target), kinds in self._flows.items():
                if target == reached and "off" in kinds and "gradient" not in kinds:
                    kinds.add("gradient")
                    pending.append(source)
        for name, loss in losses.items():
            if (made := self._known.get(loss)) is not None:
                self._join(made.by, f"loss {name}", "gradient")
        nodes = list(self._nodes.values())[0 if any(INPUT in ends for ends in self._flows) else 1 :]
        for key, end in self._stops.items():
            nodes.append(Node(key, "stop", module=self._met.get(key, end.module), end=end))
        nodes += [Node(f"loss {name}", "loss", name=name) for name in losses]
        there = {node.key for node in nodes}
        edges = [Edge(*ends, "gradient" in kinds) for ends, kinds in self._flows.items() if there.issuperset(ends)]
        return tuple(nodes), tuple(edges)

    # Modules

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        around = self._frames[-1]
        if id(module) not in self._modules:  # what it computes counts as done by the module around it
            self._frames.append(around)
            return
        path, _ = self._modules[id(module)]
        self._calls[path] += 1
        self._frames.append(_Frame(path, path if id(module) in self._registered else around.registered))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        frame = self._frames.pop()
        unseen = [t for t in tree_tensors(output) if t not in self._known and id(t) not in self.leaves]
        if unseen:  # made by what no Python function shows, as in a scripted module
            node = self._node_of(frame)
            self._read(node.key, tree_tensors(inputs))
            self._known.update({tensor: _Made(node.key) for tensor in unseen})
        self._frames[-1].part += id(module) in self._modules

    def _node_of(self, frame: _Frame) -> Node:
        return self._nodes.setdefault(frame.key, Node(frame.key, "module", module=frame.module))

    # Functions

    @passes_on
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tree_tensors((args, kwargs)))
        required_grad = any(tensor.requires_grad for tensor in inputs)
        result = func(*args, **kwargs)
        if inputs:
            name = function_name(func)
            outputs = list(tree_tensors(result))
            if name == "__setitem__" and isinstance(args[0], torch.Tensor):
                outputs.append(args[0])
            outputs += tree_tensors(kwargs.get("out"))
            if outputs or name in LEAVES_TORCH:
                self._record(name, inputs, outputs, required_grad)
        return result

    def _record(
        self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], required_grad: bool
    ) -> None:
        frame, operation = self._frames[-1], name.strip("_")
        lost = required_grad and not any(output.requires_grad for output in outputs)
        stop = self._stop_here(name, lost, outputs)
        end = self._stops.get(stop, PathEnd(""))
        if stop:
            self._met[stop] = frame.module
        cut = stop if end.cause == "cut" else ""
        if cut and end.reason.startswith((f"{operation}()", f".{name}")):  # the stop stands for the operation
            for made in filter(None, map(self._known.get, inputs)):
                if made.by != INPUT and made.by not in self._stops:
                    self._join(made.by, cut, "gradient")
            self._known.update({output: _Made(cut) for output in outputs})
            frame.part += 1
            return
        key = frame.key
        if stop and not cut:
            self._join(key, stop, "gradient")
        if not outputs:
            return
        self._node_of(frame).operations[operation] += 1
        self._read(key, inputs, cut)
        off = required_grad or any(made is not None and made.off for made in map(self._known.get, inputs))
        in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))  # no __getitem__
        for output in outputs:
            made = _Made(key, "" if output.requires_grad else cut, off and not torch.is_grad_enabled())
            self._known[output] = made
            if in_place and output._is_view() and output._base is not None:
                self._known[output._base] = made
        frame.part += bool(cut)

    def _read(self, key: str, tensors: Iterable[torch.Tensor], stop: str = "") -> None:
        """The node `key`, which the region of `stop` is around, reads `tensors`."""
        for tensor in tensors:
            made = self._known.get(tensor)
            if tensor.is_leaf and tensor.requires_grad:
                self.leaves[id(tensor)] = tensor
                self.read_by.setdefault(id(tensor), {})[key] = None
            if made is None:
                continue
            if made.stop not in ("", stop):
                self._join(made.by, made.stop, "gradient")
                self._join(made.stop, key, "values")
            else:
                self._join(made.by, key, "gradient" if tensor.requires_grad else "off" if made.off else "values")
            if made.off and tensor.requires_grad:
                self._revived.add(made.by)  # what a custom Function returned was made while autograd was off

    def _join(self, source: str, target: str, kind: str) -> None:
        if source != target:
            self._flows.setdefault((source, target), set()).add(kind)

    def _stop_here(self, name: str, lost: bool, outputs: Sequence[torch.Tensor]) -> str:
        """The stop at which a path ends in this call; empty where none does."""
        reason = f"{name.strip('_')}()" if outputs else f"{name.strip('_')}(), which leaves torch"
        if outputs and lost:
            reason = cut_reason(name, outputs[0])
        if reason not in self._reasons:
            return ""
        stop = stop_key(PathEnd("cut", reason, user_location(), self._frames[-1].registered))
        met = stop in self._stops and (lost or not outputs or self._stops[stop].cause == "unreachable")
        return stop if met else ""


def stop_key(end: PathEnd) -> str:
    """The key of the node at which a path ends."""
    return f"stop {end.reason} {end.location} {end.module}"


def _named_modules(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Every module with its path, by identity, also those in plain attributes, lists and dicts of others."""
    found = {id(submodule): (path, submodule) for path, submodule in module.named_modules()}
    for prefix, holder in module.named_modules():
        for key, value in vars(holder).items():
            path = f"{prefix}.{key}" if prefix else key
            inside = [] if key in MODULE_INTERNALS else [("", value), *contents(value)]
            for suffix, held in inside:
                if isinstance(held, nn.Module):
                    for inner, submodule in held.named_modules(prefix=f"{path}{suffix}"):
                        found.setdefault(id(submodule), (inner, submodule))
    return found


STEP = 0


def prepare(target: str | Recipe, seed: int, *, wrapped: bool, materialise: bool) -> None:
    """Build the model as a check does; `materialise` it by a forward pass first, where parameters are lazy.

    It is wrapped where that is possible; what the wrapper does to the model is then drawn too.
    """
    build(target, seed)
    state = rank_state()
    if materialise:
        batch = make_batch(state.recipe, STEP, seed=state.seed, world_size=state.world_size)
        shard = to_device(state.recipe.local_batch(batch, state.rank, state.world_size), state.device)
        for module in (state.module, state.reference.module):
            with torch.no_grad():
                call_loss(state.recipe, module, copied(shard), STEP)
    if not wrapped:
        state.recipe = replace(state.recipe, wrap=lambda module, _device: module)
    wrap()


def trace() -> GraphView | None:
    """Run the step, find out why gradients are missing, and run its forward pass once more to follow what flows.

    Every rank does, since a forward may communicate.

    Returns:
        The picture, on rank 0.
    """
    state = rank_state()
    local.begin_step(STEP, None)
    local.local_step(STEP)
    ends: dict[str, PathEnd] = {}
    with contextlib.suppress(Exception):  # the report of the check says so
        ends = repeated_step.explain(STEP)
    ends = {name: end for name, end in ends.items() if end.cause in ("cut", "unreachable")}
    module, recipe = state.reference.module, state.recipe
    state.rewind()
    recorder = FlowRecorder(module, list(ends.values()))
    losses: dict[str, torch.Tensor] = {}

    def recorded(model: nn.Module, batch: Any) -> Any:
        recorder.enter_batch(tree_tensors(batch))
        with recorder:
            result = call_loss(recipe, model, batch, STEP)
        losses.update({name: tensor for name, tensor in named_tensors(result, "loss") if tensor.requires_grad})
        return result

    state.recipe = replace(recipe, loss=recorded)
    state.run_loss(STEP, "drawing, ")
    if state.rank != 0:
        return None
    held = {id(tensor): (name,) for name, _, tensor in held_tensors(module, recipe)}
    names = {**held, **all_names(module)}
    parameters = {}
    for key, tensor in ({id(p): p for p in module.parameters()} | recorder.leaves).items():
        if key in names:
            first, readers = names[key][0], recorder.read_by.get(key, ())
            end = stop_key(ends[first]) if first in ends else ""
            parameters[first] = ParameterFact(names[key], tuple(tensor.shape), tuple(readers), end)
    return GraphView(*recorder.graph(losses), recorder.module_facts(), parameters)
