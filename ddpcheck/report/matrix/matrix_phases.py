"""One model under one combination of DDP options after another, from the same states, against the same averages.

What does not depend on the options (the states before each step, the ranks' own averaged gradients) is kept once; each
row of the matrix is a freshly built and wrapped module that is put into those states. Phases of `check_matrix`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.source_lines import record_origins
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers
from ddpcheck.gather.phases import session as phases
from ddpcheck.gather.phases.session import RankState, seed_of, the_session
from ddpcheck.gather.phases.single_process import model_seed
from ddpcheck.gather.state.external_state import Restore, put_back
from ddpcheck.gather.state.randomness import seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.training_step import ModuleState, run_backward, run_optimizer
from ddpcheck.recipe.pytree import copied, tree_tensors
from ddpcheck.recipe.recipe import call_loss
from ddpcheck.report.matrix.option_sets import VARIED, DdpOptions, ModelFacts
from ddpcheck.worlds import rank as this_rank

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


@dataclass(slots=True)
class KeptStep:
    """What a step begins from and has to come to, whatever the options."""

    before: ModuleState
    batch: Any
    averaged: dict[str, torch.Tensor | None]
    scale: dict[str, float]
    started: list[Restore]


@dataclass(slots=True)
class Wrapping:
    """A wrapped module that can be trained."""

    module: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class Rows:
    """What a rank keeps from row to row.

    Attributes:
        kept: The steps, by number and by whether the wrapper broadcasts buffers.
        baseline: What step times are compared with.
        handed_out: The parameters that `model()` has returned so far, for as long as they live, by identity.
        given: The options that the recipe gave to each `DistributedDataParallel` that it made in the row under way.
    """

    kept: dict[tuple[int, bool], KeptStep] = field(default_factory=dict)
    baseline: Wrapping | None = None
    handed_out: dict[int, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    given: list[dict[str, Any]] = field(default_factory=list)


def _rows() -> Rows:
    rows: Rows = this_rank.state.setdefault("rows", Rows())
    return rows


# Wrapping


def begin_reference(options: DdpOptions | None) -> WrappedModule:
    """Wrap a module, for the steps that each rank makes by itself; the module's hooks and structure are then known."""
    session = the_session()
    wrapped = begin_row(options)
    session.facts = replace(session.facts, find_unused_parameters=True)  # gather what any of the options may need
    session.twin_optimizer = None
    return wrapped


def begin_row(options: DdpOptions | None) -> WrappedModule:
    """Build the module anew and wrap it with these options, or as the recipe does (None)."""
    session, rows = the_session(), _rows()
    if session.wrapped is not None:
        session.wrapped = session.wrapper = session.optimizer = None
        session.module = nn.Module()  # the last row's reducer goes with its hooks on the parameters
        gc.collect()
        session.module = _build(session, rows)
    else:
        _note(rows, session.module)
    rows.given = []
    wrapped = phases.wrap(overridden_options(options, rows.given))
    if options is not None and options.hook:
        hook = getattr(importlib.import_module(_HOOKS), options.hook)
        assert session.wrapper is not None
        session.wrapper.register_comm_hook(None, hook)  # type: ignore[operator]
    return wrapped


def _build(session: RankState, rows: Rows) -> nn.Module:
    this_rank.set_status("building the model")
    seed_everything(model_seed(session.seed))
    with record_origins() as session.origins:
        module = session.recipe.build_model()
    taken = {key for key, parameter in rows.handed_out.items() if parameter() is not None}
    if taken & {id(p) for p in module.parameters()}:
        module = copy.deepcopy(module)  # model() hands out the same parameters every time
    _note(rows, module)
    into_training(module)
    return module.to(session.device)


def _note(rows: Rows, module: nn.Module) -> None:
    rows.handed_out = {key: p for key, p in rows.handed_out.items() if p() is not None}
    rows.handed_out.update({id(parameter): weakref.ref(parameter) for parameter in module.parameters()})


@contextlib.contextmanager
def overridden_options(options: DdpOptions | None, given: list[dict[str, Any]]) -> Iterator[None]:
    """While active, every `DistributedDataParallel` gets these options in place of its caller's, whoever calls it.

    Args:
        options: Those of `VARIED` that are not among them get torch's defaults; None leaves everything as it is.
        given: What the callers gave, among `VARIED`, is appended, one dict a wrapper.
    """
    ddp: Any = nn.parallel.DistributedDataParallel
    original = ddp.__init__
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

    ddp.__init__ = constructor
    try:
        yield
    finally:
        ddp.__init__ = original


def resisting(options: DdpOptions) -> dict[str, Any]:
    """What the wrapper was made with in spite of these options: `wrap` sets it after the constructor."""
    wrapper = the_session().wrapper
    found = {}
    for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        got, wanted = getattr(wrapper, name, None), options.arguments.get(name, False)
        if got is not None and bool(got) != bool(wanted):
            found[name] = got
    return found


def facts() -> ModelFacts:
    """What decides which options can make a difference, as far as one rank knows; after the recipe's own wrapping."""
    session, rows = the_session(), _rows()
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    trained = [p for p in session.module.parameters() if p.requires_grad]
    hooks = [hook for hook, _state in getattr(session.wrapper, "_comm_hooks", ())]
    return ModelFacts(
        known=tuple(name for name in VARIED if name in known),
        own=_plain(rows.given[0]) if len(rows.given) == 1 else None,
        own_hook=getattr(hooks[0], "__name__", type(hooks[0]).__name__) if hooks else "",
        gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
        bits=max((torch.finfo(p.dtype).bits for p in trained), default=32),
        buffers=sum(1 for _ in session.module.buffers()),
        nccl=this_rank.current().backend == "nccl",
    )


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None), list, tuple)
    return {name: value if isinstance(value, plain) else str(value) for name, value in given.items()}


# Steps


def keep_step(step: int) -> None:
    """Keep what this step began from and what its gradients average to; before the optimizer changes either."""
    session = the_session()
    assert session.before is not None
    before = ModuleState(
        tensors={name: tensor.clone() for name, tensor in session.before.tensors.items()},
        held=session.before.held,
        plain=session.before.plain,
    )
    averaged = {name: None if tensor is None else tensor.clone() for name, tensor in session.averaged.items()}
    _rows().kept[step, broadcasts_buffers(session.wrapper)] = KeptStep(
        before, session.batch, averaged, dict(session.scale), session.started
    )


def share_parameters() -> None:
    """Go on from rank 0's parameters everywhere."""
    session = the_session()
    if session.world_size > 1:
        with unlogged(), torch.no_grad():
            for parameter in session.twin.parameters():
                dist.broadcast(parameter.detach(), src=0, group=session.group)


def rewind(step: int, synced: bool) -> None:
    """Put the row's module into the state before the step, with the batch and the averages of that step.

    Args:
        step: Counted from 0.
        synced: Whether to take those of a wrapper that broadcasts buffers.
    """
    session = the_session()
    kept = _rows().kept[step, synced]
    this_rank.set_status(f"step {step}: beginning")
    session.before, session.batch = kept.before, kept.batch
    session.averaged, session.scale = kept.averaged, kept.scale
    session.started = kept.started
    kept.before.restore(session.module)


# Step times


def keep_baseline() -> None:
    """What was wrapped last is what the step times of the rows after it are compared with."""
    session = the_session()
    assert session.wrapped is not None and session.optimizer is not None
    _rows().baseline = Wrapping(session.module, session.wrapped, session.optimizer)


def time_steps(pairs: int) -> list[tuple[float, float]]:
    """Seconds of a training step under the baseline and under the row, in turns, so that both meet the same weather.

    A step is zero_grad, forward, backward and optimizer step. Both run the same steps from the same states, with the
    same random numbers; which of them goes first changes from pair to pair.
    """
    session, rows = the_session(), _rows()
    assert rows.baseline is not None and session.wrapped is not None and session.optimizer is not None
    row = Wrapping(session.module, session.wrapped, session.optimizer)
    steps = sorted(rows.kept)
    found = []
    with unlogged():
        for pair in range(pairs):
            step = steps[pair % len(steps)]
            this_rank.set_status(f"timing pair {pair} of {pairs}")
            kept = rows.kept[step]
            order = (rows.baseline, row) if pair % 2 == 0 else (row, rows.baseline)
            seconds = [_seconds(session, wrapping, kept, step[0]) for wrapping in order]
            found.append((seconds[pair % 2], seconds[1 - pair % 2]))
    return found


def _seconds(session: RankState, wrapping: Wrapping, kept: KeptStep, step: int) -> float:
    kept.before.restore(wrapping.module)
    put_back(kept.started)
    batch = copied(kept.batch)
    seed_everything(seed_of(session, step))
    _settle(session)
    begun = time.perf_counter()
    run_optimizer(wrapping.optimizer, "zero_grad")
    losses = _scalars(call_loss(session.recipe, wrapping.wrapped, batch, step))
    run_backward(functools.reduce(torch.add, losses))
    run_optimizer(wrapping.optimizer, "step")
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return time.perf_counter() - begun


def _settle(session: RankState) -> None:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    if session.world_size > 1:
        dist.barrier(group=session.group)


def _scalars(result: Any) -> Sequence[torch.Tensor]:
    return [part.reshape(()) for part in tree_tensors(result) if part.requires_grad]
