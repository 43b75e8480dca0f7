"""The phases in which ranks gather what `ddpcheck graph` draws: a step, the size of its graph, the graph itself."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.gather.autograd.autograd_graph import WALK_LIMIT, all_names, unregistered_tensors, walk_graph
from ddpcheck.gather.autograd.unregistered_leaves import unregistered_leaves
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import missing_gradients
from ddpcheck.gather.phases.model_build import build, wrap
from ddpcheck.gather.phases.rank_state import RankState, rank_state
from ddpcheck.gather.steps.training_step import compute_loss, make_batch
from ddpcheck.recipe.pytree import copied, to_device, tree_leaves, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.graph.drawing_data import Detail, Edge, GraphView, ModuleFact, Node, ParameterFact
from ddpcheck.report.graph.tensor_flow import INPUT, FlowRecorder, Place
from ddpcheck.worlds import rank as this_rank

STEP = 0
MOST_OPERATIONS = 60
"""Nodes of the autograd graph that `auto` still draws one by one; more are drawn as modules."""


def prepare(target: str | Recipe, seed: int, *, wrapped: bool, materialise: bool) -> None:
    """Build the model as a check does.

    Args:
        target: The recipe.
        seed: Of all random numbers.
        wrapped: Whether the wrapper can be built; what it does to the model is then drawn too.
        materialise: Whether lazy parameters must be given their shapes by a forward pass first.
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


def run_step() -> None:
    """Run the step, find out why gradients are missing, and how large the loss's graph is."""
    local.begin_step(STEP, None)
    local.local_step(STEP)
    this_rank.state["path ends"] = {}
    with contextlib.suppress(Exception):  # the report of the check says so
        this_rank.state["path ends"] = missing_gradients.explain(STEP)
    state = rank_state()
    state.step.before.restore(state.reference.module)
    walk = walk_graph(state.run_loss(STEP, "counting, ").parts)
    this_rank.state["graph size"] = walk.size if walk.complete else None


def trace(detail: str) -> GraphView | None:
    """Run the forward pass once more and follow what flows; every rank does, since a forward may communicate.

    Args:
        detail: "operations", "modules", or "auto" for operations where there are few.

    Returns:
        The picture, on rank 0.

    Raises:
        UsageError: The operations cannot be drawn, and modules will not do.
    """
    state = rank_state()
    module = state.reference.module
    state.step.before.restore(module)
    path_ends: dict[str, PathEnd] = this_rank.state["path ends"]
    size: int | None = this_rank.state["graph size"]
    most = None if detail == "operations" else MOST_OPERATIONS
    by_operations = detail != "modules" and (most is None or (size is not None and size <= most))
    ends = list(dict.fromkeys(end for end in path_ends.values() if end.cause in ("cut", "unreachable")))
    registered = {id(submodule) for submodule in module.modules()}
    batch = copied(state.step.batch)
    recorder = FlowRecorder(_module_names(module), registered, tree_tensors(batch), ends, keep=by_operations)
    losses: dict[str, torch.Tensor] = {}

    def recorded(model: nn.Module, _batch: Any) -> Any:
        with recorder:
            result = call_loss(state.recipe, model, batch, STEP)
        losses.update(_named_losses(result))
        return result

    recipe = replace(state.recipe, loss=recorded)
    compute_loss(recipe, module, state.step.batch, step=STEP, seed=state.seed_of(STEP), place="drawing, ")
    if state.rank != 0:
        return None
    found = _Found(state, recorder, losses, path_ends)
    picture = found.operations(size, most) if by_operations else None
    return picture or found.flow(size)


def _named_losses(result: Any) -> dict[str, torch.Tensor]:
    """The losses that are minimised, by key or position; tensors that are only logged are left out."""
    pairs = result.items() if isinstance(result, Mapping) else [("", result)]
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        tensors = [tensor for tensor in tree_tensors(value) if tensor.requires_grad]
        name = f"{key}" if key != "" else "loss"
        found.update({name if len(tensors) == 1 else f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)})
    return found


def _module_names(module: nn.Module) -> dict[int, str]:
    """The path of every module, also of those that are held without being registered."""
    names = {id(submodule): name for name, submodule in module.named_modules()}
    held = {id(tensor): name for name, tensor in unregistered_tensors(module)}
    for unregistered in _unregistered_modules(module):
        for name, tensor in unregistered.named_parameters():
            if held.get(id(tensor), "").endswith(f".{name}"):
                path = held[id(tensor)].removesuffix(f".{name}")
                for inner, submodule in unregistered.named_modules():
                    names.setdefault(id(submodule), f"{path}.{inner}" if inner else path)
                break
    return names


def _unregistered_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in plain attributes, lists and dicts of `module`."""
    registered = {id(submodule) for submodule in module.modules()}
    for holder in module.modules():
        for value in vars(holder).values():
            for item in tree_leaves(value):
                if isinstance(item, nn.Module) and id(item) not in registered:
                    yield item


def _module_facts(module: nn.Module, recorder: FlowRecorder) -> dict[str, ModuleFact]:
    found: dict[str, ModuleFact] = {}
    for holder in (module, *_unregistered_modules(module)):
        for submodule in holder.modules():
            if (name := recorder.names.get(id(submodule))) is not None and name not in found:
                elements = sum(p.numel() for p in submodule.parameters())
                found[name] = ModuleFact(type(submodule).__name__, elements, recorder.calls[name])
    return found


@dataclass(slots=True)
class _Operations:
    """A graph whose nodes are Python identities.

    Attributes:
        nodes: The operations themselves, each after those that it reads; while they are kept, nothing else gets their
            identities.
        names: Of the operations, from the losses backwards.
        edges: In the direction of the data; parameters and losses take part by the identity of their tensor.
    """

    nodes: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)


def _operations(roots: Sequence[torch.Tensor], leaves: Container[int]) -> _Operations | None:
    """The autograd graph behind `roots`, depth first, None where it is too large to be walked.

    Leaves, as far as their identities are in `leaves`, stand directly at the operations that read them.
    """
    found = _Operations()
    path: list[tuple[Any, Iterator[tuple[Any, int]]]] = []  # an operation, and those of its inputs that are left

    def enter(node: Any) -> None:
        if id(node) not in found.names:
            found.names[id(node)] = type(node).__name__
            path.append((node, iter(node.next_functions)))

    for root in roots:
        if root.grad_fn is None:
            continue
        enter(root.grad_fn)
        while path:
            reader, inputs = path[-1]
            node = next((node for node, _ in inputs if node is not None), None)
            if len(found.names) > WALK_LIMIT:
                return None
            if node is None:
                found.nodes.append(path.pop()[0])
            elif type(node).__name__ != "AccumulateGrad":
                found.edges[id(node), id(reader)] = None
                enter(node)
            elif id(node.variable) in leaves:
                found.edges[id(node.variable), id(reader)] = None
        found.edges[id(root.grad_fn), id(root)] = None
    return found


class _Found:
    """The record of one forward pass, from which a `GraphView` is made."""

    def __init__(
        self, state: RankState, recorder: FlowRecorder, losses: Mapping[str, torch.Tensor], ends: Mapping[str, PathEnd]
    ) -> None:
        module = state.reference.module
        self.recorder = recorder
        self.losses = losses
        self.path_ends = ends
        self.modules = _module_facts(module, recorder)
        self.tensors: dict[int, torch.Tensor] = {id(p): p for p in module.parameters()}
        self.names = all_names(module)
        for leaf in recorder.leaves.values():
            if id(leaf) not in self.tensors:
                strange = unregistered_leaves([leaf], module, before={id(leaf): leaf}, recipe=state.recipe, ignore=[])
                if strange and not strange[0].name.startswith("a tensor of shape"):
                    self.tensors[id(leaf)] = leaf
                    self.names[id(leaf)] = (strange[0].name,)
        self._nodes: dict[str, Node] = {}
        self._edges: dict[tuple[str, str], bool] = {}

    # By modules

    def flow(self, size: int | None) -> GraphView:
        """The graph by modules, and the data that flows between them."""
        recorder = self.recorder
        used = {place for pair in recorder.flows for place in pair}
        if INPUT in used:
            self._add(Node(_place_key(INPUT), "input", name="batch"))
        for place, called in recorder.places.items():
            self._add(Node(_place_key(place), "module", module=place[0], operations=dict(called)))
        for (source, target), kinds in recorder.flows.items():
            self._join(_place_key(source), _place_key(target), "gradient" in kinds)
        self._add_stops()
        for index, stop in recorder.stops.items():
            for place in stop.sources:
                self._join(_place_key(place), _stop_key(index), True)
        for index, place in recorder.stop_edges:
            self._join(_stop_key(index), _place_key(place), False)
        for name, loss in self.losses.items():
            self._add(Node(_loss_key(name), "loss", name=name))
            if (maker := recorder.maker_of(loss)) is not None:
                self._join(_place_key(maker), _loss_key(name), True)
        read_by = {key: [_place_key(place) for place in places] for key, places in recorder.reads.items()}
        return self._picture("modules", read_by, size)

    def _add_stops(self) -> None:
        for index, end in enumerate(self.recorder.ends):
            stop = self.recorder.stops.get(index)
            self._add(Node(_stop_key(index), "stop", module=stop.module if stop else end.module, end=end))

    # By operations

    def operations(self, size: int | None, most: int | None) -> GraphView | None:
        """The autograd graph, with the module in which each operation was made; None where it has too many nodes."""
        recorder = self.recorder
        dead = [tensor for stop in recorder.stops.values() for tensor in stop.dead]
        graph = _operations([*self.losses.values(), *dead], self.tensors) if recorder.keeps else None
        if most is not None and (graph is None or len(graph.names) > most):
            return None
        if graph is None:
            raise UsageError("the graph has too many operations to draw them one by one; pass --detail modules")
        keys = {node: f"operation {number}" for number, node in enumerate(graph.names)}
        owners = self._owners(graph)
        for name in self.losses:
            self._add(Node(_loss_key(name), "loss", name=name))
        for node, label in graph.names.items():
            self._add(Node(keys[node], "operation", name=label, module=owners.get(node)))
        keys |= {id(tensor): _loss_key(name) for name, tensor in self.losses.items()}
        read_by: dict[int, list[str]] = {}
        for source, target in graph.edges:
            if source in self.tensors:
                read_by.setdefault(source, []).append(keys[target])
            elif target in keys:
                self._join(keys[source], keys[target], True)
        self._add_stops()
        for index, stop in recorder.stops.items():
            for tensor in stop.dead:
                if id(tensor) in self.tensors:
                    read_by.setdefault(id(tensor), []).append(_stop_key(index))
                elif id(tensor.grad_fn) in keys:
                    self._join(keys[id(tensor.grad_fn)], _stop_key(index), True)
            for tensor in stop.alive:
                if id(tensor.grad_fn) in keys:
                    self._join(_stop_key(index), keys[id(tensor.grad_fn)], False)
        return self._picture("operations", read_by, size)

    def _owners(self, graph: _Operations) -> dict[int, str | None]:
        """The module of each node; one that no Python function returned belongs where all its readers belong."""
        owners = {node: self.recorder.owners[node][1] for node in graph.names if node in self.recorder.owners}
        readers: dict[int, list[int]] = {}
        for source, target in graph.edges:
            if target in graph.names:
                readers.setdefault(source, []).append(target)
        for node in map(id, reversed(graph.nodes)):  # so that readers come first
            if node not in owners:
                theirs = {owners.get(reader) for reader in readers.get(node, ())}
                owners[node] = theirs.pop() if len(theirs) == 1 else None
        return owners

    # Both

    def _add(self, node: Node) -> None:
        self._nodes.setdefault(node.key, node)

    def _join(self, source: str, target: str, gradient: bool) -> None:
        if source in self._nodes and target in self._nodes and source != target:
            self._edges[source, target] = self._edges.get((source, target), False) or gradient

    def _picture(self, detail: Detail, read_by: Mapping[int, Sequence[str]], size: int | None) -> GraphView:
        stops = self.recorder.ends
        ends = {name: _stop_key(stops.index(end)) for name, end in self.path_ends.items() if end in stops}
        parameters = {}
        for key, tensor in self.tensors.items():
            names = self.names[key]
            readers = tuple(dict.fromkeys(read_by.get(key, ())))
            parameters[names[0]] = ParameterFact(names, tuple(tensor.shape), readers, ends.get(names[0], ""))
        return GraphView(
            detail=detail,
            nodes=tuple(self._nodes.values()),
            edges=tuple(Edge(source, target, gradient) for (source, target), gradient in self._edges.items()),
            modules=self.modules,
            parameters=parameters,
            size=size,
        )


def _place_key(place: Place) -> str:
    module, part = place
    return "batch" if place == INPUT else f"{'loss function' if module is None else 'module'} {module or ''} {part}"


def _stop_key(index: int) -> str:
    return f"stop {index}"


def _loss_key(name: str) -> str:
    return f"loss {name}"
