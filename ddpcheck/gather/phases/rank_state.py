"""The state that a rank keeps from phase to phase of a check, divided by when it is valid.

A phase is a function that a check calls on its ranks through `World.run`; it gathers evidence and returns plain data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from ddpcheck.findings.evidence.modules import GradientHook, ModuleDescription, WrapperFacts
from ddpcheck.findings.evidence.parameters import ParameterChange
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import Origins
from ddpcheck.gather.ddp.ddp_wrapper import SeenParameter
from ddpcheck.gather.state.external_state import ExternalState, Restore, put_back
from ddpcheck.gather.state.module_state import ModuleState
from ddpcheck.gather.steps.seeds import step_seed
from ddpcheck.gather.steps.training_step import Gradients, Loss, compute_loss
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.worlds import rank as this_rank

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(slots=True)
class ReferenceModule:
    """A second module, built like the one that is wrapped and never wrapped itself: the local steps run on it.

    Attributes:
        module: The module.
        optimizer: Made once the wrapper cannot be used any more; from then on this module is the one that is trained.
        trainable: The parameters that required grad at wrapping, by name: the only ones that DDP ever hears of.
        seen: All of its parameters at wrapping, under all of their names.
        submodules: Its modules at wrapping, by name.
        constants: Tensors that required no grad before the first forward pass, whatever it makes of them, by identity.
        changed: Changes that forward passes have made to `seen`, by name.
        created: Parameters that a forward pass has created, with their lines; DDP has not heard of them.
        leaves: Leaves of the graph of the step before, by identity.
        arrivals: How many gradients have arrived at each parameter.
        outputs: What its forward has returned.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)
    seen: dict[str, SeenParameter] = field(default_factory=dict)
    submodules: dict[str, nn.Module] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    changed: dict[str, ParameterChange] = field(default_factory=dict)
    created: dict[str, Location | None] = field(default_factory=dict)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class TrainingModel:
    """The wrapped model with its optimizer; a new one each time that a module is wrapped.

    Attributes:
        module: The module in the wrapper.
        wrapped: What `wrap` has returned, and what the loss is called with.
        wrapper: The `DistributedDataParallel` in it; `wrapped` itself where there is none.
        optimizer: Of the parameters of `wrapped` that require grad.
        facts: The wrapper's options that detectors need.
        trainable: The parameters of `module` that required grad at wrapping, by name.
        unregistered: Names of the tensors without gradient that `module` held then without having registered them.
        hooks: Hooks of the user's that `wrap` has put in the way of gradients.
        external_state: The state that the recipe keeps outside of its modules.
        calls: How often the "wrapper" and the "inner" module were called in the step under way.
        counters: Handles of the hooks that count them.
    """

    module: nn.Module
    wrapped: nn.Module
    wrapper: nn.Module
    optimizer: torch.optim.Optimizer
    facts: WrapperFacts
    trainable: dict[str, nn.Parameter]
    unregistered: frozenset[str]
    hooks: tuple[GradientHook, ...]
    external_state: ExternalState
    calls: dict[str, int] = field(default_factory=dict)
    counters: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class StepData:
    """The step under way.

    Attributes:
        before: State of the module when the step began.
        batch: The shard of this rank.
        external: Restores the state that the recipe keeps outside of its modules to what it was when that was drawn.
        local: Gradients of this rank by itself, by name.
        norms: Their norms.
        missing: Names of the parameters that received none.
        without_random: Whether `local` are the gradients with constants in place of random numbers.
        averaged: Averages of `local` over the ranks; None where no rank has one.
        scale: Root mean square of the ranks' norms, by name.
        after: State of the reference module after its forward and backward pass.
    """

    before: ModuleState
    batch: Any = None
    external: list[Restore] = field(default_factory=list)
    local: Gradients = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    without_random: bool = False
    averaged: dict[str, torch.Tensor | None] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    after: ModuleState | None = None


@dataclass(slots=True)
class RankState:
    """The state of one rank during a check.

    Attributes:
        recipe: What is checked.
        seed: Of all random numbers.
        device: Of the modules.
        rank: Of this process.
        world_size: Number of ranks.
        group: A process group of the check's own; None where there is one rank.
        module: The module that is wrapped.
        reference: The one that is not.
        origins: The lines that made `module` and its parts.
        description: `module` as `model()` has returned it.
        arrived_evaluating: Whether that was in eval mode.
        syncbn: Names of the SyncBatchNorm modules that ran on CPU so far.
        stack: Is closed with the rank.
        step: The step under way.
    """

    recipe: Recipe
    seed: int
    device: torch.device
    rank: int
    world_size: int
    group: Any
    module: nn.Module
    reference: ReferenceModule
    origins: Origins
    description: ModuleDescription
    arrived_evaluating: bool
    syncbn: list[str]
    stack: contextlib.ExitStack
    wrapping: TrainingModel | None = None
    step: StepData = field(init=False)

    @property
    def training_model(self) -> TrainingModel:
        """The wrapped model; there is one from `wrap` on."""
        assert self.wrapping is not None
        return self.wrapping

    def seed_of(self, step: int) -> int:
        """The seed of the random numbers that this rank draws in a step."""
        return step_seed(self.seed, step, self.rank)

    def run_loss(self, step: int, place: str = "") -> Loss:
        """The loss of the reference module on this rank's shard; see `compute_loss`."""
        seed = self.seed_of(step)
        return compute_loss(self.recipe, self.reference.module, self.step.batch, step=step, seed=seed, place=place)


def rank_state() -> RankState:
    """The state of this rank."""
    state: RankState = this_rank.state["check"]
    return state


def recover() -> None:
    """Be ready for the next phase after one that raised: the reference module is what it was when the step began."""
    state = rank_state()
    state.reference.outputs.clear()
    if hasattr(state, "step"):
        state.step.before.restore(state.reference.module)


def replays_step(
    function: Callable[Concatenate[int, Arguments], Result],
) -> Callable[Concatenate[int, Arguments], Result]:
    """A phase that runs the step under way once more on the reference module, and leaves no trace.

    Module and external state are what they were when the step began, and afterwards ready for another such phase.
    """

    @functools.wraps(function)
    def phase(step: int, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        state = rank_state()
        now = state.training_model.external_state.capture()
        put_back(state.step.external)
        state.step.before.restore(state.reference.module)
        try:
            return function(step, *args, **kwargs)
        finally:
            state.step.before.restore(state.reference.module)
            state.reference.outputs.clear()
            put_back(now)

    return phase
