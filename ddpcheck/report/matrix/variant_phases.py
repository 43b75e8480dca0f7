"""Phases of `check_matrix`: a step through the wrapper that is compiled, or made in micro-batches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.phases import model_build
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.state.external_state import Restore, put_back
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.gather.state.module_state import ModuleState, capture_state
from ddpcheck.gather.steps.gradient_distance import difference, norm, scales, tolerances
from ddpcheck.gather.steps.training_step import (
    clear_gradients,
    compute_gradients,
    compute_loss,
    gradients_of,
    make_batch,
    run_backward,
)
from ddpcheck.recipe.pytree import batch_size, shard_batch, to_device
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.matrix.matrix_phases import wrap
from ddpcheck.report.matrix.option_sets import DdpOptions
from ddpcheck.report.matrix.variants import BACKEND, MICRO_BATCHES, VariantFacts, VariantStep
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import is_asked_for, run_as_compiled

_STEP = 0
_COMPILED_TOLERANCE = 0.1  # that of `gather.phases.ddp_step`
_Gradients = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class _Prepared:
    batch: Any
    before: ModuleState
    external: Sequence[Restore]
    gradients: _Gradients  # that the wrapper leaves for the batch
    parts: list[Any]
    scale: dict[str, float]


def prepare(target: Recipe | str, seed: int, options: DdpOptions | None) -> VariantFacts:
    """Build the model, wrap it, and make the step as it is: of this rank by itself, and through the wrapper."""
    model_build.build(target, seed)
    wrap(options)
    state = rank_state()
    model, reference = state.training_model, state.reference.module
    for handle in model.counters:
        handle.remove()
    batch = make_batch(state.recipe, _STEP, seed=seed, world_size=state.world_size)
    batch = to_device(state.shard_of(batch), state.device)
    one = _Prepared(batch, capture_state(state.module), model.external_state.capture(), {}, [], {})
    this_rank.state["variants"] = one
    with unlogged():
        one.gradients, _ = _through_wrapper([batch], synced=True)
        one.scale = scales(one.gradients)
        not_split, apart = _split(one, reference)
    return VariantFacts(_why_not_compiled(state.module), not_split, apart)


def accumulated_step(synced: bool) -> VariantStep:
    """The step in micro-batches; all but the last one under `no_sync`, unless each is to be synchronised."""
    one: _Prepared = this_rank.state["variants"]
    with unlogged():
        gradients, drew = _through_wrapper(one.parts, synced=synced)
    return VariantStep(fingerprints(gradients.items()), _differences(one, gradients), drew)


def compiled_step() -> VariantStep:
    """The step with the module in the wrapper compiled; it stays so."""
    one, known = this_rank.state["variants"], _graphs()
    wrapper: Any = rank_state().training_model.wrapper
    wrapper.module = torch.compile(wrapper.module, backend=BACKEND)
    with unlogged(), run_as_compiled():
        gradients, drew = _through_wrapper([one.batch], synced=True)
    made = _graphs() - known if known >= 0 else -1
    return VariantStep(fingerprints(gradients.items()), _differences(one, gradients, _COMPILED_TOLERANCE), drew, made)


def _graphs() -> int:
    """How many graphs this process has compiled; -1 where this torch does not say it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # private to torch
    return -1 if counters is None else int(counters["stats"]["unique_graphs"])


def _through_wrapper(parts: Sequence[Any], *, synced: bool) -> tuple[_Gradients, bool]:
    """The gradients that the wrapper leaves for some batches, and whether random numbers were drawn for them."""
    one, state = this_rank.state["variants"], rank_state()
    model, wrapper, seed = state.training_model, state.training_model.wrapper, state.seed_of(_STEP)
    one.before.restore(state.module)
    put_back(one.external)
    clear_gradients(state.module)
    drew = False
    for number, part in enumerate(parts, 1):
        put_off = not synced and number < len(parts)
        with wrapper.no_sync() if put_off else contextlib.nullcontext():  # type: ignore[operator]
            loss = compute_loss(
                state.recipe, model.wrapped, part, step=_STEP, seed=seed, place=f"micro-batch {number}, "
            )
            drew |= "torch" in loss.drew
            run_backward(loss.total / len(parts))
    return {name: gradient.clone() for name, gradient in gradients_of(model.trainable).items()}, drew


def _split(one: _Prepared, reference: nn.Module) -> tuple[str, tuple[Difference, ...]]:
    """Why the batch cannot be made in micro-batches, or how far these are from it without DDP."""
    state = rank_state()
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in state.module.modules()):
        return "BatchNorm normalises by the statistics of a batch, and a micro-batch has others", ()
    try:
        size = batch_size(one.batch)
    except TargetError as error:
        return f"the batch of a rank cannot be split: {error}", ()
    if size % MICRO_BATCHES:
        return f"the {size} samples of a rank cannot be split into {MICRO_BATCHES} equal micro-batches", ()
    one.parts = [shard_batch(one.batch, number, MICRO_BATCHES) for number in range(MICRO_BATCHES)]
    found: list[_Gradients] = []
    for batch in (one.batch, *one.parts):
        one.before.restore(reference)
        put_back(one.external)
        try:
            gradients, loss = compute_gradients(
                state.recipe, reference, batch, step=_STEP, seed=state.seed_of(_STEP), place="by itself, "
            )
        except Exception as error:
            return f"the loss of a micro-batch cannot be computed: {error}".partition("\n")[0], ()
        if loss.drew:
            return "the model draws random numbers, other ones for each micro-batch", ()
        found.append({name: gradient.clone() for name, gradient in gradients.items()})
    whole, *parts = found
    sums = {
        name: sum(part[name] for part in parts if name in part) / MICRO_BATCHES
        for name in {name for part in parts for name in part}
    }
    for name, scale in scales(whole).items():
        sizes = [norm(part[name]) for part in parts if name in part]
        one.scale[name] = max([one.scale.get(name, 0.0), scale, *sizes])
    return "", _differences(one, sums, against=whole)


def _differences(
    one: _Prepared, gradients: Mapping[str, Any], tolerance: float | None = None, against: _Gradients | None = None
) -> tuple[Difference, ...]:
    against = one.gradients if against is None else against
    allowed = tolerances(against, one.scale, None)
    return tuple(
        difference(
            name,
            gradients.get(name),
            against.get(name),
            scale=one.scale.get(name, 0.0),
            tolerance=tolerance or allowed.get(name, 0.0),
        )
        for name in sorted({*against, *gradients})
    )


def _why_not_compiled(module: nn.Module) -> str:
    """Why `torch.compile` is not tried on the module."""
    if is_asked_for():
        return "the recipe compiles it"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript has compiled it"
    from torch import _dynamo as dynamo  # which the constructor of the wrapper has imported

    supported = getattr(dynamo, "is_dynamo_supported", None)  # private to torch: without it, it is tried
    return "" if supported is None or supported() else "torch.compile does not run on this platform and Python"
