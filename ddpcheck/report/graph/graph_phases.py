"""The phases in which ranks gather what `ddpcheck graph` draws: why gradients are missing, and the data flow."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.autograd.unregistered_leaves import held_tensors
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import missing_gradients
from ddpcheck.gather.phases.model_build import build, wrap
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.steps.training_step import make_batch
from ddpcheck.recipe.pytree import copied, named_tensors, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.graph.drawing_data import GraphView, ParameterFact
from ddpcheck.report.graph.tensor_flow import FlowRecorder, stop_key

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
        ends = missing_gradients.explain(STEP)
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
