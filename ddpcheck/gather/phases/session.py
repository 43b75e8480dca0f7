"""What lasts on a rank from phase to phase of a check, and the phases before the first step.

A phase is a function that `ddpcheck.check` calls through `World.run`; it gathers evidence and returns plain data.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.modules import BuiltModule, GradientHook, ModuleDescription, WrappedModule, WrapperFacts
from ddpcheck.findings.evidence.parameters import ParameterChange
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import Origins, assignment_of, record_origins, relative_path
from ddpcheck.gather.autograd.autograd_graph import all_names, unregistered_tensors
from ddpcheck.gather.autograd.gradient_hooks import record_hooks, recorded_hooks
from ddpcheck.gather.collectives.collective_log import note_collective, record_collectives, unlogged
from ddpcheck.gather.ddp.ddp_constructor import (
    compare_options,
    constructor_options,
    spelled_option,
    wrapper_attributes,
)
from ddpcheck.gather.ddp.ddp_wrapper import SeenParameter, broadcasts_buffers, changes, facts_of
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.phases.single_process import HANDOVER, model_seed, step_seed, uneven_batch
from ddpcheck.gather.state.external_state import ExternalState, Restore, put_back
from ddpcheck.gather.state.module_description import describe, digest_of, fingerprint, fingerprints
from ddpcheck.gather.state.randomness import seed_everything, settle_device
from ddpcheck.gather.state.training_mode import ARRIVED_EVALUATING, into_training
from ddpcheck.gather.steps.training_step import (
    Gradients,
    ModuleState,
    differs_in_structure,
)
from ddpcheck.recipe.recipe import Recipe, summary
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.compilation import run_as_written

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(slots=True)
class RankState:
    """What one rank keeps during a check.

    Attributes:
        module: The module that is wrapped.
        twin: A second one, built alike and never wrapped, on which the Local steps run.
        built: What `model()` has returned.
        arrived_evaluating: Whether that was in eval mode.
        watched: The twin on which hooks of ours are.
        wrapped: What `wrap` made of `module`, and what the loss is called with.
        wrapper: The `DistributedDataParallel` in it; `wrapped` itself where there is none.
        known: The twin's parameters that were trainable when it was wrapped, which is all that DDP ever hears of.
        seen: All of its parameters then, under all of their names.
        holders: Its modules then, by name.
        changed: What forward passes of the twin have done to them.
        owners: As `known`, of `module`.
        leaves: Of the graph of the step before.
        constants: Tensors that required no grad before the first forward, whatever it makes of them.
        late: Parameters that a forward pass of the twin has made, with their lines; the wrapper has not heard of them.
        surroundings: The state that the recipe keeps outside of its modules.
        quiet: Whether the local gradients of the step under way are those without random numbers.
        wrap_hooks: What `wrap` has put in the way of gradients.
        counters: Handles of our own hooks on the wrapper and the module in it.
        started: What puts that back to what it was when the step began.
        twin_optimizer: Set once the wrapper cannot be used any more; then the twin holds the state of training.
    """

    recipe: Recipe
    seed: int
    device: torch.device
    rank: int
    world_size: int
    group: Any
    module: nn.Module
    twin: nn.Module
    origins: Origins
    built: ModuleDescription | None = None
    arrived_evaluating: bool = False
    watched: nn.Module | None = None
    wrapped: nn.Module | None = None
    wrapper: nn.Module | None = None
    facts: WrapperFacts = field(default_factory=WrapperFacts)
    optimizer: torch.optim.Optimizer | None = None
    twin_optimizer: torch.optim.Optimizer | None = None
    batch: Any = None
    before: ModuleState | None = None
    surroundings: ExternalState | None = None
    wrap_hooks: tuple[GradientHook, ...] = ()
    started: list[Restore] = field(default_factory=list)
    after: ModuleState | None = None
    local: Gradients = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    quiet: bool = False
    averaged: dict[str, torch.Tensor | None] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    known: dict[str, nn.Parameter] = field(default_factory=dict)
    seen: dict[str, SeenParameter] = field(default_factory=dict)
    holders: dict[str, nn.Module] = field(default_factory=dict)
    changed: dict[str, ParameterChange] = field(default_factory=dict)
    owners: dict[str, nn.Parameter] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    late: dict[str, Location | None] = field(default_factory=dict)
    own_state: frozenset[str] = frozenset()
    calls: dict[str, int] = field(default_factory=dict)
    counters: list[Any] = field(default_factory=list)
    syncbn: list[str] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def the_session() -> RankState:
    """The session of this rank."""
    session: RankState = this_rank.state["session"]
    return session


def build(target: str | Recipe, seed: int) -> BuiltModule:
    """Load the recipe and build the module twice, under the same seed."""
    context = this_rank.current()
    record_collectives(context.directory, context.rank)
    run_as_written()
    this_rank.set_status("loading the target")
    stack = contextlib.ExitStack()
    syncbn = stack.enter_context(synchronised_on_cpu()) if context.device == "cpu" else []
    record_hooks()
    recipe = load_on_rank(target)
    device = torch.device(context.device)
    settle_device(device)
    this_rank.set_status("building the model")
    seed_everything(model_seed(seed))
    with record_origins() as origins:
        module = recipe.build_model()
    if isinstance(find_ddp(module), nn.parallel.DistributedDataParallel):
        raise TargetError(
            "model() returned a module that is, or holds, a DistributedDataParallel; return the bare module, and wrap "
            "it in the recipe's wrap(module, device)"
        )
    seed_everything(model_seed(seed))
    twin = recipe.build_model()
    if twin is module or {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}:
        twin = copy.deepcopy(module)  # model() hands out the same parameters every time
    with unlogged():
        group = dist.new_group(timeout=datetime.timedelta(days=1)) if context.world_size > 1 else None
    session = RankState(
        recipe=recipe,
        seed=seed,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        group=group,
        module=module.to(device),
        twin=twin.to(device),
        origins=origins,
        syncbn=syncbn,
        stack=stack,
    )
    this_rank.state["session"] = session
    session.built = description = describe(module)
    session.arrived_evaluating = into_training(module)
    into_training(twin)
    trainable = sum(p.requires_grad for p in module.parameters())
    return BuiltModule(digest_of(description), description.uninitialised, trainable, len(description.parameters))


def recover() -> None:
    """Be ready for the next phase after one that raised: the twin is what it was when the step began."""
    session = the_session()
    session.outputs.clear()
    if session.before is not None:
        session.before.restore(session.twin)


def description() -> ModuleDescription:
    """The module of this rank as `model()` has returned it, in full; asked for when the digests differ."""
    built = the_session().built
    assert built is not None
    return built


def locations(names: Sequence[str]) -> dict[str, Location]:
    """The lines that made the parameters, buffers and modules called `names`."""
    session = the_session()
    found = {name: session.origins.of_name(session.module, name) for name in names if name}
    return {name: where for name, where in found.items() if where is not None}


def assignments(names: Sequence[str]) -> dict[str, Location]:
    """The lines that assign the attributes called `names`."""
    found = {name: assignment_of(the_session().module, name) for name in names}
    return {name: where for name, where in found.items() if where is not None}


def aliases() -> dict[str, tuple[str, ...]]:
    """All names of the tied parameters, by the first."""
    return {names[0]: names for names in all_names(the_session().module).values() if len(names) > 1}


def wrap(around: contextlib.AbstractContextManager[None] | None = None) -> WrappedModule:
    """Wrap the module as the user does, and make the optimizers.

    Args:
        around: Entered for the recipe's own `wrap`; it may change what the DDP constructor is told.
    """
    session = the_session()
    this_rank.set_status("wrapping the model")
    names = {id(p): name for name, p in session.module.named_parameters()}
    original = session.module
    hooks = recorded_hooks()
    with _watch_construction() as construction, around or contextlib.nullcontext():
        session.wrapped = session.recipe.wrap_module(session.module, session.device)
    session.wrap_hooks += tuple(hook for hook in recorded_hooks() if hook not in hooks)
    session.wrapper = find_ddp(session.wrapped)
    if session.wrapper is not session.wrapped and session.wrapper.module is not original:
        session.wrapper = session.wrapped  # a part of the model is wrapped, not the whole
    inner = getattr(session.wrapper, "module", session.wrapper)
    reshaped, trouble = False, ""
    if isinstance(inner, nn.Module) and (inner is not original or differs_in_structure(inner, session.twin)):
        if differs_in_structure(inner, session.twin):
            reshaped = _shapes(inner) != _shapes(session.twin)
            session.twin = copy.deepcopy(inner)
            trouble = _hand_over(session.twin) if reshaped and session.rank == 0 else ""
        session.module = inner
    trainable = {name for name, p in session.module.named_parameters() if p.requires_grad}
    for name, parameter in session.twin.named_parameters():
        parameter.requires_grad_(name in trainable)  # wrap may have frozen some
    session.facts = facts_of(session.wrapper, names)
    session.optimizer = session.recipe.build_optimizer(p for p in session.wrapped.parameters() if p.requires_grad)
    owned = {id(p): name for name, p in session.module.named_parameters()}
    held = {id(p) for group in session.optimizer.param_groups for p in group["params"]}
    session.own_state = frozenset(name for name, _ in plain_state(session.module))
    session.owners = {name: p for name, p in session.module.named_parameters() if p.requires_grad}
    count_calls(session)
    _watch_twin(session)
    ours = (session.wrapped, session.wrapper, session.module, session.twin, session.optimizer)
    recipe = session.recipe
    session.surroundings = ExternalState(
        (recipe.loss, recipe.shard, recipe.optimizer), session.twin, [id(thing) for thing in ours]
    )
    return WrappedModule(
        facts=session.facts,
        options={**construction.options, **wrapper_attributes(session.wrapper)},
        optimizer=_optimizer_options(session.optimizer, session.module),
        parameters=fingerprints(session.module.named_parameters()),
        buffers=fingerprints(session.module.named_buffers()),
        loss_location=_defined_at(session.recipe.loss),
        hooks=session.wrap_hooks,
        wrapper=type(session.wrapped).__name__,
        broadcasts_buffers=broadcasts_buffers(session.wrapper),
        changes=changes(construction.seen, session.module) if construction.seen else {},
        parameters_at_construction={name: parameter.value for name, parameter in construction.seen.items()},
        replaces_module=reshaped,
        transfer_error=trouble,
        foreign_tensors=len(held - set(owned)),
        not_in_optimizer=tuple(name for key, name in owned.items() if key not in held and name in trainable),
    )


def _defined_at(function: Any) -> Location | None:
    """The line that defines a function of the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Location(relative_path(code.co_filename), code.co_firstlineno) if code is not None else None


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _hand_over(module: nn.Module) -> str:
    """Put the module that `wrap` has made where the single process finds it; returns why that cannot be done."""
    try:
        (this_rank.current().directory / HANDOVER).write_bytes(wire.dumps(module))
    except Exception as error:  # what a module holds may be anything
        return summary(error)
    return ""


def rewound(function: Callable[Concatenate[int, Arguments], Result]) -> Callable[Concatenate[int, Arguments], Result]:
    """A phase that runs the step under way again: the recipe's own state is what it was, and afterwards what it is."""

    @functools.wraps(function)
    def phase(step: int, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        session = the_session()
        assert session.surroundings is not None
        now = session.surroundings.capture()
        put_back(session.started)
        try:
            return function(step, *args, **kwargs)
        finally:
            put_back(now)

    return phase


def find_ddp(wrapped: nn.Module) -> nn.Module:
    """The one `DistributedDataParallel` inside what `wrap` returned (a compiled module, say), else `wrapped`."""
    ddp = nn.parallel.DistributedDataParallel
    inside = [module for module in wrapped.modules() if isinstance(module, ddp)]
    return inside[0] if len(inside) == 1 else wrapped


@dataclass(slots=True)
class _Construction:
    """What the DDP constructor was told, and each parameter as it was when that was done."""

    options: dict[str, str] = field(default_factory=dict)
    seen: dict[str, SeenParameter] = field(default_factory=dict)


@contextlib.contextmanager
def _watch_construction() -> Iterator[_Construction]:
    """Compare the ranks' options before the DDP constructor communicates, and note what it has seen."""
    ddp: Any = nn.parallel.DistributedDataParallel
    original = ddp.__init__
    found = _Construction()

    @functools.wraps(original)
    @passes_on
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        found.options = constructor_options(original, self, *args, **kwargs)
        compare_options(found.options)
        original(self, *args, **kwargs)
        found.seen.update({name: SeenParameter.of(p, fingerprint(p)) for name, p in self.module.named_parameters()})

    ddp.__init__ = constructor
    try:
        yield found
    finally:
        ddp.__init__ = original


def _optimizer_options(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, str]:
    names = {id(p): name for name, p in module.named_parameters()}
    found = {"class": type(optimizer).__name__, "groups": str(len(optimizer.param_groups))}
    for index, group in enumerate(optimizer.param_groups):
        held = [names.get(id(p), "?") for p in group["params"]]
        found[f"group {index} parameters"] = ", ".join(sorted(held))
        found[f"group {index} order"] = ", ".join(held)
        found.update({f"group {index} {key}": spelled_option(v) for key, v in group.items() if key != "params"})
    return found


def plain_state(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors without gradient that `module` holds without having registered them."""
    return [(name, tensor) for name, tensor in unregistered_tensors(module) if not tensor.requires_grad]


def _will_broadcast(wrapper: Any) -> bool:
    """Whether a forward pass of `wrapper` broadcasts buffers, which all ranks have to join."""
    return broadcasts_buffers(wrapper) and not getattr(getattr(wrapper, "_join_config", None), "enable", False)


def count_calls(session: RankState) -> None:
    """From now on, count the calls of the wrapper and of the module in it."""

    def counter(key: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            session.calls[key] = session.calls.get(key, 0) + 1
            if key == "wrapper" and _will_broadcast(session.wrapper):
                mode = "with gradients" if torch.is_grad_enabled() else "without gradients"
                note_collective("DistributedDataParallel.forward", mode)

        return hook

    assert session.wrapper is not None
    session.counters = [session.wrapper.register_forward_pre_hook(counter("wrapper"))]
    if session.module is not session.wrapper:
        session.counters.append(session.module.register_forward_pre_hook(counter("inner")))


def _watch_twin(session: RankState) -> None:
    """Count the gradients that arrive at each of the twin's parameters, and keep what its forward returns.

    What it holds that requires no grad yet is noted.
    """
    if session.watched is session.twin:  # wrapped once more, with other options
        return
    session.watched = session.twin
    session.known = {name: p for name, p in session.twin.named_parameters() if p.requires_grad}
    every = nn.Module.named_parameters(session.twin, remove_duplicate=False)
    session.seen = {name: SeenParameter.of(p) for name, p in every}
    session.holders = dict(session.twin.named_modules())
    session.changed = {}
    held = (*session.twin.buffers(), *(tensor for _, tensor in unregistered_tensors(session.twin)))
    session.constants = {id(tensor): tensor for tensor in held if not tensor.requires_grad}
    for name, parameter in session.twin.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_arrival(session, name))
    session.twin.register_forward_hook(lambda _module, _inputs, output: session.outputs.append(output))


def _arrival(session: RankState, name: str) -> Any:
    def hook(_parameter: torch.Tensor) -> None:
        session.arrivals[name] = session.arrivals.get(name, 0) + 1

    return hook


def notes() -> list[str]:
    """Sentences on how this rank ran the recipe."""
    session = the_session()
    found = [ARRIVED_EVALUATING] if session.arrived_evaluating else []
    if session.syncbn:
        found.append(
            "SyncBatchNorm refuses CPU tensors: ddpcheck stood in for it with the same statistics, over all-reduces "
            "that autograd differentiates"
        )
    if uneven := uneven_batch(session.recipe, 0, seed=session.seed, world_size=session.world_size):
        found.append(uneven)
    if this_rank.current().shared_gpu:
        found.append("several ranks share one GPU, through gloo with CUDA tensors")
    return found


def seed_of(session: RankState, step: int) -> int:
    """The seed of the random numbers that this rank draws in a step."""
    return step_seed(session.seed, step, session.rank)
