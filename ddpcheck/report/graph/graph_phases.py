"""The phases in which ranks gather what `ddpcheck graph` draws: why gradients are missing, and the data flow."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, all_names, contents
from ddpcheck.gather.autograd.unregistered_leaves import held_tensors
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import missing_gradients
from ddpcheck.gather.phases.model_build import build, wrap
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.steps.training_step import make_batch
from ddpcheck.recipe.pytree import copied, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.graph.drawing_data import GraphView, ModuleFact, ParameterFact
from ddpcheck.report.graph.tensor_flow import FlowRecorder, stop_key

STEP = 0


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
        ends = missing_gradients.explain(STEP)
    ends = {name: end for name, end in ends.items() if end.cause in ("cut", "unreachable")}
    module, recipe = state.reference.module, state.recipe
    state.step.before.restore(module)
    modules = _named_modules(module)
    names = {key: name for key, (name, _) in modules.items()}
    registered = {id(submodule) for submodule in module.modules()}
    recorders: list[FlowRecorder] = []
    losses: dict[str, torch.Tensor] = {}

    def recorded(model: nn.Module, batch: Any) -> Any:
        recorder = FlowRecorder(names, registered, tree_tensors(batch), list(ends.values()))
        recorders.append(recorder)
        with recorder:
            result = call_loss(recipe, model, batch, STEP)
        losses.update(_named_losses(result))
        return result

    state.recipe = replace(recipe, loss=recorded)
    state.run_loss(STEP, "drawing, ")
    if state.rank != 0:
        return None
    recorder = recorders[0]
    nodes, edges = recorder.graph(losses)
    tensors: dict[int, torch.Tensor] = {id(p): p for p in module.parameters()}
    aliases = all_names(module)
    held = {id(tensor): name for name, _, tensor in held_tensors(module, recipe)}
    for key, leaf in recorder.leaves.items():
        if key in held and key not in aliases:
            tensors[key], aliases[key] = leaf, (held[key],)
    parameters = {}
    for key, tensor in tensors.items():
        first = aliases[key][0]
        end = stop_key(ends[first]) if first in ends else ""
        parameters[first] = ParameterFact(aliases[key], tuple(tensor.shape), tuple(recorder.read_by.get(key, ())), end)
    facts = {
        name: ModuleFact(type(found).__name__, sum(p.numel() for p in found.parameters()), recorder.calls[name])
        for name, found in modules.values()
    }
    return GraphView(nodes, edges, facts, parameters)


def _named_losses(result: Any) -> dict[str, torch.Tensor]:
    """The losses that are minimised, by key or position; tensors that are only logged are left out."""
    pairs = result.items() if isinstance(result, Mapping) else [("", result)]
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        tensors = [tensor for tensor in tree_tensors(value) if tensor.requires_grad]
        name = f"{key}" if key != "" else "loss"
        found.update({name if len(tensors) == 1 else f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)})
    return found


def _named_modules(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Every module with its path, by identity, also those in plain attributes, lists and dicts of others."""
    found = {id(submodule): (name, submodule) for name, submodule in module.named_modules()}
    for prefix, holder in module.named_modules():
        for key, value in vars(holder).items():
            if key not in MODULE_INTERNALS:
                path = f"{prefix}.{key}" if prefix else key
                for place, held in [(path, value), *((f"{path}{suffix}", item) for suffix, item in contents(value))]:
                    if isinstance(held, nn.Module):
                        for inner, submodule in held.named_modules(prefix=place):
                            found.setdefault(id(submodule), (inner, submodule))
    return found
