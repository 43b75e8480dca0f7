"""A step of one rank run again: how far it is from itself, and whether something changes gradients on their way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ddpcheck.findings.evidence.gradients import Difference, RepeatedStep
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.gather.autograd.autograd_graph import named_parameters, walk_graph
from ddpcheck.gather.autograd.gradient_hooks import own_functions, recorded_hooks
from ddpcheck.gather.ddp.loop_events import backward_through
from ddpcheck.gather.phases.rank_state import RankState, rank_state, replays_step
from ddpcheck.gather.state.external_state import put_back
from ddpcheck.gather.steps.gradient_distance import difference, eps_of, norm
from ddpcheck.gather.steps.training_step import Gradients, clear_gradients, gradients_of, run_backward

_FACTOR = 2.0  # a power of two: what is linear comes out with the very same digits
_NOT_ROUNDING = 1e3  # times machine eps


@dataclass(slots=True)
class _Run:
    gradients: Gradients = field(default_factory=dict)
    node_names: frozenset[str] = frozenset()
    feeds_others: bool = False


@replays_step
def repeat_step(step: int) -> RepeatedStep:
    """The local step three times more from the same state and seed, the third with the output gradient doubled."""
    state = rank_state()
    runs = []
    for factor in (1.0, 1.0, _FACTOR):
        state.step.before.restore(state.reference.module)
        put_back(state.step.external)
        runs.append(_run(state, step, factor))
    first, second, doubled = runs
    halved = {name: gradient / _FACTOR for name, gradient in doubled.gradients.items()}
    nonlinear = [item.name for item in _differences(first.gradients, halved) if item.bad]
    return RepeatedStep(
        differences=_differences(first.gradients, second.gradients),
        nonlinear=() if doubled.feeds_others else tuple(nonlinear),
        hooks=(*recorded_hooks(), *own_functions(first.node_names)),
    )


def _run(state: RankState, step: int, factor: float) -> _Run:
    """One step with everything that starts a backward pass times `factor`."""
    module = state.reference.module
    clear_gradients(module)
    run = _Run()
    own = {id(p) for p in module.parameters()}

    @passes_on
    def enlarged(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("tensors", "grad_tensors"), args, strict=False))
        roots, started = {**kwargs, **given}["tensors"], {"grad_tensors": None, **kwargs, **given}["grad_tensors"]
        roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        started = [started] if isinstance(started, torch.Tensor) else list(started or [None] * len(roots))
        walk = walk_graph(roots)
        run.node_names |= walk.node_names
        run.feeds_others |= any(id(leaf) not in own for leaf in walk.leaves)
        del walk
        started = [factor * (torch.ones_like(t) if g is None else g) for t, g in zip(roots, started, strict=True)]
        return original(roots, started, *args[2:], **{k: v for k, v in kwargs.items() if k not in _STARTS})

    with backward_through(enlarged):
        run_backward(state.run_loss(step, "repeating, ").total)
    run.gradients = {name: gradient.clone() for name, gradient in gradients_of(named_parameters(module)).items()}
    return run


_STARTS = ("tensors", "grad_tensors")


def _differences(first: Gradients, second: Gradients) -> tuple[Difference, ...]:
    return tuple(
        difference(
            name, second.get(name), gradient, scale=norm(gradient), tolerance=_NOT_ROUNDING * eps_of(gradient.dtype)
        )
        for name, gradient in first.items()
    )
