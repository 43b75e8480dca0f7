"""A step through the wrapper and its reducer, and what it leaves behind; the same step as the recipe compiles it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, LoopEvent
from ddpcheck.gather.autograd.autograd_graph import named_parameters, unregistered_state
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.ddp.ddp_wrapper import hook_loss, trains_apart
from ddpcheck.gather.ddp.loop_events import recorded
from ddpcheck.gather.phases.model_build import count_calls
from ddpcheck.gather.phases.rank_state import TrainingModel, rank_state, replays_step
from ddpcheck.gather.state.external_state import put_back
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints
from ddpcheck.gather.state.module_state import capture_state
from ddpcheck.gather.steps.gradient_distance import against_average, dense, difference, scales
from ddpcheck.gather.steps.training_step import (
    clear_gradients,
    compute_loss,
    run_backward,
    run_optimizer,
    versions,
)
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import run_as_compiled

# Of kernels that round in other places, at any depth and dtype; the smallest fault measured is 0.5.
_COMPILED_TOLERANCE = 0.1


def ddp_step(step: int) -> DdpStepEvidence:
    """Forward, backward and optimizer step through the wrapper, compared with the averaged local gradients."""
    state = rank_state()
    model, data, module = state.training_model, state.step, state.module
    model.calls.clear()
    put_back(data.external)
    this_rank.set_status(f"step {step}: zero_grad")
    run_optimizer(model.optimizer, "zero_grad")
    clear_gradients(module, *model.trainable.values())
    since = versions(module)
    apart = trains_apart(model.wrapper)
    with recorded(module, model.wrapper, model.optimizer) as recorder:
        seed = state.seed_of(step)
        loss = compute_loss(state.recipe, model.wrapped, data.batch, step=step, seed=seed, place="DDP ")
        this_rank.set_status(f"step {step}: DDP backward")
        run_backward(loss.total, module=module, since=since)
        del loss
        this_rank.set_status(f"step {step}: DDP comparison")
        lossy = hook_loss(model.wrapper)
        floor = scales({name: t for name, t in data.averaged.items() if t is not None}) if lossy else {}
        differences = (
            ()
            if apart
            else tuple(
                against_average(
                    name,
                    None if p.grad is None else dense(p.grad),
                    data.averaged.get(name),
                    world_size=state.world_size,
                    scale=data.scale.get(name, 0.0),
                    lossy=lossy,
                    floor=floor.get(name, 0.0),
                )
                for name, p in model.trainable.items()
            )
        )
        gradients = {n: 0 if p.grad is None else fingerprint(dense(p.grad)) for n, p in model.trainable.items()}
        computed_with = fingerprints(module.named_parameters())
        this_rank.set_status(f"step {step}: optimizer")
        run_optimizer(model.optimizer, "step")
    unregistered = fingerprints(unregistered_state(module))
    return DdpStepEvidence(
        rank=state.rank,
        step=step,
        gradients=gradients,
        parameters=fingerprints(module.named_parameters()),
        parameters_before_optimizer=computed_with,
        buffers=fingerprints(module.named_buffers()),
        state={name: value for name, value in unregistered.items() if name in model.unregistered},
        new_state={name: value for name, value in unregistered.items() if name not in model.unregistered},
        optimizer=_optimizer_state(model),
        against_local=differences,
        wrapper_calls=model.calls.get("wrapper", 0),
        inner_calls=model.calls.get("inner", 0),
        events=(*recorder.events, *([LoopEvent("apart")] if apart else [])),
        parameters_after_backward=recorder.values,
    )


def _optimizer_state(model: TrainingModel) -> dict[str, int]:
    names = {id(p): name for name, p in model.module.named_parameters()}
    found: dict[str, int] = {}
    for parameter, state in getattr(model.optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            label = f"optimizer {names.get(id(parameter), '?')} {key}"
            if isinstance(value, torch.Tensor):
                found[label] = fingerprint(value)
            elif isinstance(value, int | float | bool):
                found[label] = hash(value)
    return found


@replays_step
def compiled_step(step: int) -> CompiledStep:
    """Forward and backward through the compiled wrapper, from the state in which the step began (`worlds.compilation`).

    The optimizer does not step, and the module is afterwards what it is now. Hooks of ours are taken off meanwhile, and
    collectives are not logged: either would have another graph compiled than training compiles.
    """
    state = rank_state()
    model, data, module = state.training_model, state.step, state.module
    now = capture_state(module)
    data.before.restore(module)
    clear_gradients(module)
    for handle in model.counters:
        handle.remove()
    seed = state.seed_of(step)
    try:
        with unlogged(), run_as_compiled():
            loss = compute_loss(state.recipe, model.wrapped, data.batch, step=step, seed=seed, place="compiled DDP ")
            this_rank.set_status(f"step {step}: compiled DDP backward")
            loss.total.backward()
        found = {name: p.grad for name, p in named_parameters(module).items() if p.requires_grad}
        gradients = {name: None if gradient is None else dense(gradient) for name, gradient in found.items()}
    finally:
        count_calls(model)
        now.restore(module)
    averaged = {name: gradient for name, gradient in data.averaged.items() if gradient is not None}
    scale = scales(averaged)
    differences = tuple(
        difference(name, gradient, averaged.get(name), scale=scale.get(name, 0.0), tolerance=_COMPILED_TOLERANCE)
        for name, gradient in gradients.items()
        if gradient is not None or name in averaged
    )
    return CompiledStep(
        rank=state.rank,
        step=step,
        gradients={name: 0 if gradient is None else fingerprint(gradient) for name, gradient in gradients.items()},
        differences=differences,
        drew="torch" in loss.drew,
    )
