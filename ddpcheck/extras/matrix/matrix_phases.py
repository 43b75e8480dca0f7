"""Phases of `check_matrix`: wrap with a row's options, time steps, run variant steps.

A variant step runs the compiled wrapper, or the wrapper on micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn

from ddpcheck.extras.matrix.option_sets import (
    BACKEND,
    MICRO_BATCHES,
    VARIED,
    ModelFacts,
    VariantFacts,
    VariantStep,
    WrappedRow,
)
from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.replace import replace
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.gather.collectives.collective_log import without_logging
from ddpcheck.gather.patching import Patch
from ddpcheck.gather.phases import model_build
from ddpcheck.gather.phases.rank_state import RankState, ReferenceModule, TrainingModel, rank_state
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.gather.state.module_state import ModuleState, Restore, capture_state
from ddpcheck.gather.state.randomness import seed_everything
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.gradient_distance import difference, norm, scales, tolerances
from ddpcheck.recipe.pytree import batch_size, copied, shard_batch, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.matrix.option_sets import DDPOptions
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import stance, uses_compile

_SHARDING = "torch.distributed.fsdp._fully_shard"  # absent from some torch versions; importing takes seconds
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


# Wrapping


def wrap(options: DDPOptions | None) -> WrappedRow:
    """Wrap the module with `options`, or if None, as the recipe does."""
    passed: list[dict[str, Any]] = []
    wrapped = model_build.wrap(override_options(options, passed))
    wrapper = rank_state().training_model.wrapper
    if options is not None and options.hook:
        hook = getattr(importlib.import_module(_HOOKS), options.hook)
        wrapper.register_comm_hook(wrapper.process_group, hook)  # type: ignore[operator]  # None would be all ranks
    model = _model_facts(passed)
    requested = (model.own or {}) if options is None else options.arguments
    flags = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    actual = {name: value for name in flags if (value := getattr(wrapper, name, None)) is not None}
    set_by_wrap = {name: value for name, value in actual.items() if bool(value) != bool(requested.get(name, False))}
    return WrappedRow(**structs.asdict(wrapped), model=model, set_by_wrap=set_by_wrap)


def wrap_in_shards(shape: tuple[int, ...]) -> WrappedRow:
    """Shard the module by `fully_shard` over a mesh of this shape."""
    state = rank_state()
    state.recipe = replace(state.recipe, wrap=functools.partial(_sharded, shape))
    return wrap(None)


@forwards_calls  # errors of torch are no bugs of ddpcheck
def _sharded(shape: tuple[int, ...], module: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(module, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))
    return module


@contextlib.contextmanager
def override_options(options: DDPOptions | None, passed: list[dict[str, Any]]) -> Iterator[None]:
    """Override the options of every `DistributedDataParallel` constructor in this context.

    Arguments listed in `VARIED` but not in `options` get torch's defaults. If `options` is None, nothing is overridden.
    For each wrapper, the caller's arguments listed in `VARIED` are appended to `passed`, as a dict.
    """

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            except TypeError:  # the call itself raises a better message
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            passed.append({name: arguments[name] for name in VARIED if name in arguments})
            if options is not None:
                arguments = {name: value for name, value in arguments.items() if name not in VARIED}
                arguments.update(options.arguments)
            del arguments[next(iter(signature.parameters))]
            return original(self, **arguments)  # type: ignore[no-any-return]

        return constructor

    with Patch(nn.parallel.DistributedDataParallel, "__init__", make):  # around any earlier patch
        yield


def _model_facts(wrappers: Sequence[Mapping[str, Any]]) -> ModelFacts:
    """Collect one rank's facts; `wrappers` has the arguments of each DDP constructor call."""
    state = rank_state()
    params = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    trained = [p for p in state.module.parameters() if p.requires_grad]
    hooks = [hook for hook, _state in getattr(state.training_model.wrapper, "_comm_hooks", ())]
    plain = (bool, int, float, str, type(None), list, tuple)
    own = {name: x if isinstance(x, plain) else str(x) for kwargs in wrappers for name, x in kwargs.items()}
    return ModelFacts(
        known=tuple(name for name in VARIED if name in params),
        own=own if len(wrappers) == 1 else None,
        own_hook=getattr(hooks[0], "__name__", type(hooks[0]).__name__) if hooks else "",
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        bits=max((torch.finfo(p.dtype).bits for p in trained), default=32),
        buffers=sum(1 for _ in state.module.buffers()),
        nccl=(nccl := this_rank.current().backend == "nccl"),
        shards=(nccl or state.device.type == "cpu") and importlib.util.find_spec(_SHARDING) is not None,
    )


# Step times


def prepare_timing(target: Recipe | str, seed: int, steps: int, option_sets: Sequence[DDPOptions | None]) -> None:
    """Build two models, wrap them with the options in `option_sets`, and store a timer.

    A step is zero_grad, forward, backward and optimizer step. Both models run the same steps from the same states with
    the same random numbers.
    """
    model_build.build(target, seed)
    state = rank_state()
    recipe = state.recipe
    timed: list[tuple[TrainingModel, ModuleState]] = []
    for module, options in zip((state.module, state.reference.module), option_sets, strict=True):
        state.module = module
        state.reference = ReferenceModule(module, submodules={"": module})  # no gradient counters
        wrap(options)
        timed.append((state.training_model, capture_state(state.module)))
    batches = []
    for step in range(steps):
        batch = training_step.make_batch(recipe, step, seed=seed, world_size=state.world_size)
        batches.append(to_device(state.shard_of(batch), state.device))
    restore_external = state.training_model.external_state.capture()

    def seconds(index: int, pair: int) -> float:
        (model, before), step = timed[index], pair % steps
        before.restore(model.module)
        restore_external()
        batch = copied(batches[step])
        seed_everything(state.seed_of(step))
        _synchronize(state)
        if state.world_size > 1:
            dist.barrier(group=state.group)
        start = time.perf_counter()
        training_step.run_optimizer(model.optimizer, "zero_grad")
        result = call_loss(recipe, model.wrapped, batch, step)
        losses = [part.reshape(()) for part in tree_tensors(result) if part.requires_grad]
        training_step.run_backward(functools.reduce(torch.add, losses))
        training_step.run_optimizer(model.optimizer, "step")
        _synchronize(state)
        return time.perf_counter() - start

    this_rank.state["seconds of a step"] = seconds


def time_steps(pairs: int) -> list[tuple[float, float]]:
    """Time pairs of steps; return (baseline, row) seconds of each pair on this rank.

    The order within a pair alternates, so that a slow change of the machine's speed has no effect.
    """
    seconds = this_rank.state["seconds of a step"]
    results = []
    with without_logging():
        for pair in range(pairs):
            this_rank.set_status(f"timing pair {pair} of {pairs}")
            first = pair % 2
            measured = {index: seconds(index, pair) for index in (first, 1 - first)}
            results.append((measured[0], measured[1]))
    return results


def _synchronize(state: RankState) -> None:
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


_STEP = 0
_COMPILED_TOLERANCE = 0.1  # same as in `gather.phases.ddp_step`
_Gradients = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class _Prepared:
    batch: Any
    before: ModuleState
    restore_external: Restore
    gradients: _Gradients  # gradients of the batch through the wrapper
    parts: list[Any]
    scale: dict[str, float]


def prepare(target: Recipe | str, seed: int, options: DDPOptions | None) -> VariantFacts:
    """Prepare compiled and micro-batched steps: run a plain step as their reference."""
    model_build.build(target, seed)
    wrap(options)
    state = rank_state()
    model, reference = state.training_model, state.reference.module
    for handle in model.counters:
        handle.remove()
    batch = training_step.make_batch(state.recipe, _STEP, seed=seed, world_size=state.world_size)
    batch = to_device(state.shard_of(batch), state.device)
    prep = _Prepared(batch, capture_state(state.module), model.external_state.capture(), {}, [], {})
    this_rank.state["variants"] = prep
    with without_logging():
        prep.gradients, _ = _ddp_gradients([batch], synced=True)
        prep.scale = scales(prep.gradients)
        not_split, differences = _split_batch(prep, reference)
    return VariantFacts(_why_not_compiled(state.module), not_split, differences)


def accumulated_step(synced: bool) -> VariantStep:
    """Run the step in micro-batches; unless `synced`, only the last micro-batch is synchronised."""
    prep: _Prepared = this_rank.state["variants"]
    with without_logging():
        gradients, drew = _ddp_gradients(prep.parts, synced=synced)
    return VariantStep(fingerprints(gradients.items()), _differences(prep, gradients), drew)


def compiled_step() -> VariantStep:
    """Run the step with the wrapped module compiled; the module stays compiled."""
    prep, before = this_rank.state["variants"], _num_graphs()
    wrapper: Any = rank_state().training_model.wrapper
    wrapper.module = torch.compile(wrapper.module, backend=BACKEND)
    with without_logging(), stance("default"):
        gradients, drew = _ddp_gradients([prep.batch], synced=True)
    count = _num_graphs() - before if before >= 0 else -1
    return VariantStep(fingerprints(gradients.items()), _differences(prep, gradients, _COMPILED_TOLERANCE), drew, count)


def _num_graphs() -> int:
    """Return the number of graphs compiled in this process; -1 if unknown."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)  # private to torch
    return -1 if counters is None else int(counters["stats"]["unique_graphs"])


def _ddp_gradients(parts: Sequence[Any], *, synced: bool) -> tuple[_Gradients, bool]:
    """Return gradients accumulated over `parts` under DDP, and True if torch drew random numbers."""
    prep, state = this_rank.state["variants"], rank_state()
    model, wrapper, seed = state.training_model, state.training_model.wrapper, state.seed_of(_STEP)
    prep.before.restore(state.module)
    prep.restore_external()
    training_step.clear_gradients(state.module)
    drew = False
    for number, part in enumerate(parts, 1):
        uses_no_sync = not synced and number < len(parts)
        with wrapper.no_sync() if uses_no_sync else contextlib.nullcontext():  # type: ignore[operator]
            loss = training_step.compute_loss(
                state.recipe, model.wrapped, part, step=_STEP, seed=seed, phase=f"micro-batch {number}, "
            )
            drew |= "torch" in loss.drew
            training_step.run_backward(loss.total / len(parts))
    return {name: gradient.clone() for name, gradient in training_step.gradients_of(model.trainable).items()}, drew


def _split_batch(prep: _Prepared, reference: nn.Module) -> tuple[str, tuple[Difference, ...]]:
    """Split a batch into micro-batches; return (error, gradient differences from the whole batch)."""
    state = rank_state()
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in state.module.modules()):
        return "BatchNorm normalises by the statistics of a batch, and those of a micro-batch differ", ()
    try:
        size = batch_size(prep.batch)
    except TargetError as error:
        return f"the batch of a rank cannot be split: {error}", ()
    if size % MICRO_BATCHES:
        return f"the {size} samples of a rank cannot be split into {MICRO_BATCHES} equal micro-batches", ()
    prep.parts = [shard_batch(prep.batch, number, MICRO_BATCHES) for number in range(MICRO_BATCHES)]
    results: list[_Gradients] = []
    for batch in (prep.batch, *prep.parts):
        prep.before.restore(reference)
        prep.restore_external()
        try:
            gradients, loss = training_step.compute_gradients(
                state.recipe, reference, batch, step=_STEP, seed=state.seed_of(_STEP), phase="without the wrapper, "
            )
        except Exception as error:
            return f"the loss of a micro-batch cannot be computed: {error}".partition("\n")[0], ()
        if loss.drew:
            return "the model draws random numbers, other ones for each micro-batch", ()
        results.append({name: gradient.clone() for name, gradient in gradients.items()})
    whole, *parts = results
    means = {
        name: sum(part[name] for part in parts if name in part) / MICRO_BATCHES
        for name in {name for part in parts for name in part}
    }
    for name, scale in scales(whole).items():
        sizes = [norm(part[name]) for part in parts if name in part]
        prep.scale[name] = max([prep.scale.get(name, 0.0), scale, *sizes])
    return "", _differences(prep, means, against=whole)


def _differences(
    prep: _Prepared, gradients: Mapping[str, Any], tolerance: float | None = None, against: _Gradients | None = None
) -> tuple[Difference, ...]:
    against = prep.gradients if against is None else against
    allowed = tolerances(against, prep.scale, None)
    return tuple(
        difference(
            name,
            gradients.get(name),
            against.get(name),
            scale=prep.scale.get(name, 0.0),
            tolerance=tolerance or allowed.get(name, 0.0),
        )
        for name in sorted({*against, *gradients})
    )


def _why_not_compiled(module: nn.Module) -> str:
    """Return why `torch.compile` is not tried on the module, or "" if tried."""
    if uses_compile():
        return "the recipe compiles it"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript has compiled it"
    from torch import _dynamo as dynamo  # already imported by the wrapper's constructor

    supported = getattr(dynamo, "is_dynamo_supported", None)  # private to torch; if absent, compilation is tried
    return "" if supported is None or supported() else "torch.compile does not run on this platform and Python"
