"""Phases of `check_matrix`: wrapping with the options of a row, and timing steps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn

from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.replace import replace
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.patching import Patch
from ddpcheck.gather.phases import model_build
from ddpcheck.gather.phases.rank_state import RankState, ReferenceModule, TrainingModel, rank_state
from ddpcheck.gather.state.external_state import put_back
from ddpcheck.gather.state.module_state import ModuleState, capture_state
from ddpcheck.gather.state.randomness import seed_everything
from ddpcheck.gather.steps.training_step import make_batch, run_backward, run_optimizer
from ddpcheck.recipe.pytree import copied, to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.report.matrix.option_sets import VARIED, DdpOptions, ModelFacts, WrappedRow
from ddpcheck.worlds import rank as this_rank

_SHARDING = "torch.distributed.fsdp._fully_shard"  # where this torch has it; to import it takes seconds
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


# Wrapping


def wrap(options: DdpOptions | None) -> WrappedRow:
    """Wrap the module with these options, or as the recipe does (None)."""
    given: list[dict[str, Any]] = []
    wrapped = model_build.wrap(overridden_options(options, given))
    wrapper = rank_state().training_model.wrapper
    if options is not None and options.hook:
        hook = getattr(importlib.import_module(_HOOKS), options.hook)
        wrapper.register_comm_hook(wrapper.process_group, hook)  # type: ignore[operator]  # None would be all ranks
    model = _model_facts(given)
    told = (model.own or {}) if options is None else options.arguments
    flags = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    got = {name: value for name in flags if (value := getattr(wrapper, name, None)) is not None}
    set_by_wrap = {name: value for name, value in got.items() if bool(value) != bool(told.get(name, False))}
    return WrappedRow(**structs.asdict(wrapped), model=model, set_by_wrap=set_by_wrap)


def wrap_in_shards(shape: tuple[int, ...]) -> WrappedRow:
    """Have `fully_shard` shard the module over a mesh of this shape, whatever the recipe does."""
    state = rank_state()
    state.recipe = replace(state.recipe, wrap=functools.partial(_sharded, shape))
    return wrap(None)


@passes_on  # what torch refuses is no error of ddpcheck
def _sharded(shape: tuple[int, ...], module: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(module, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))
    return module


@contextlib.contextmanager
def overridden_options(options: DdpOptions | None, given: list[dict[str, Any]]) -> Iterator[None]:
    """While active, every `DistributedDataParallel` gets these options in place of its caller's, whoever calls it.

    Those of `VARIED` that are not among them get torch's defaults; None leaves everything as it is. What the callers
    gave, among `VARIED`, is appended to `given`, one dict a wrapper.
    """

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        @passes_on
        def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            except TypeError:  # the call itself will say what is wrong with it
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            given.append({name: arguments[name] for name in VARIED if name in arguments})
            if options is not None:
                arguments = {name: value for name, value in arguments.items() if name not in VARIED}
                arguments.update(options.arguments)
            del arguments[next(iter(signature.parameters))]
            return original(self, **arguments)  # type: ignore[no-any-return]

        return constructor

    with Patch(nn.parallel.DistributedDataParallel, "__init__", make):  # around what else stands in its place by now
        yield


def _model_facts(given: Sequence[Mapping[str, Any]]) -> ModelFacts:
    """The facts as far as one rank knows; `given` is what the recipe gave to each wrapper that it made."""
    state = rank_state()
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    trained = [p for p in state.module.parameters() if p.requires_grad]
    hooks = [hook for hook, _state in getattr(state.training_model.wrapper, "_comm_hooks", ())]
    return ModelFacts(
        known=tuple(name for name in VARIED if name in known),
        own={name: _plain(value) for name, value in given[0].items()} if len(given) == 1 else None,
        own_hook=getattr(hooks[0], "__name__", type(hooks[0]).__name__) if hooks else "",
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        bits=max((torch.finfo(p.dtype).bits for p in trained), default=32),
        buffers=sum(1 for _ in state.module.buffers()),
        nccl=(nccl := this_rank.current().backend == "nccl"),
        shards=(nccl or state.device.type == "cpu") and importlib.util.find_spec(_SHARDING) is not None,
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None | list | tuple) else str(value)


# Step times


def prepare_timing(target: Recipe | str, seed: int, steps: int, two: Sequence[DdpOptions | None]) -> None:
    """Build the model twice, wrap it as the baseline and as the row do, and make what times a step of either.

    A step is zero_grad, forward, backward and optimizer step. Both run the same steps from the same states, with the
    same random numbers.
    """
    model_build.build(target, seed)
    state = rank_state()
    recipe = state.recipe
    timed: list[tuple[TrainingModel, ModuleState]] = []
    for module, options in zip((state.module, state.reference.module), two, strict=True):
        state.module = module
        state.reference = ReferenceModule(module, submodules={"": module})  # as one whose gradients nobody counts
        wrap(options)
        timed.append((state.training_model, capture_state(state.module)))
    batches = []
    for step in range(steps):
        batch = make_batch(recipe, step, seed=seed, world_size=state.world_size)
        batches.append(to_device(state.shard_of(batch), state.device))
    external = state.training_model.external_state.capture()

    def seconds(place: int, pair: int) -> float:
        (model, before), step = timed[place], pair % steps
        before.restore(model.module)
        put_back(external)
        batch = copied(batches[step])
        seed_everything(state.seed_of(step))
        _synchronize(state)
        if state.world_size > 1:
            dist.barrier(group=state.group)
        begun = time.perf_counter()
        run_optimizer(model.optimizer, "zero_grad")
        result = call_loss(recipe, model.wrapped, batch, step)
        losses = [part.reshape(()) for part in tree_tensors(result) if part.requires_grad]
        run_backward(functools.reduce(torch.add, losses))
        run_optimizer(model.optimizer, "step")
        _synchronize(state)
        return time.perf_counter() - begun

    this_rank.state["seconds of a step"] = seconds


def time_steps(pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step under the baseline and under the row, in turns, so that noise hits both.

    Which of them goes first changes from pair to pair.
    """
    seconds = this_rank.state["seconds of a step"]
    found = []
    with unlogged():
        for pair in range(pairs):
            this_rank.set_status(f"timing pair {pair} of {pairs}")
            first = pair % 2
            measured = {place: seconds(place, pair) for place in (first, 1 - first)}
            found.append((measured[0], measured[1]))
    return found


def _synchronize(state: RankState) -> None:
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)
