"""The state that a rank keeps from phase to phase of a check, divided by when it is valid.

A phase is a function that a check calls on its ranks through `World.run`; it gathers evidence and returns plain data.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from ddpcheck.findings.evidence.gradients import RandomNumbers
from ddpcheck.findings.evidence.modules import GradientHook, ModuleDescription, WrapperFacts
from ddpcheck.findings.evidence.steps import LoopEvent, ParameterChange
from ddpcheck.findings.report import Location
from ddpcheck.gather.ddp.copied_optimizer import CopiedOptimizer
from ddpcheck.gather.ddp.ddp_wrapper import SeenParameter
from ddpcheck.gather.ddp.model_parts import DataPlace, Part, as_wholes
from ddpcheck.gather.ddp.sharding import gathered
from ddpcheck.gather.state.external_state import ExternalState, Restore, put_back
from ddpcheck.gather.state.module_description import Origins
from ddpcheck.gather.state.module_state import ModuleState
from ddpcheck.gather.state.tensor_file import TensorFile
from ddpcheck.gather.steps.training_step import Gradients, Loss, compute_loss, step_seed
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.worlds import rank as this_rank

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(slots=True)
class ReferenceModule:
    """A second module, built like the one that is wrapped and never wrapped itself: the local steps run on it."""

    module: nn.Module
    # Made once the wrapper cannot be used any more; from then on this module is the one that is trained.
    optimizer: torch.optim.Optimizer | None = None
    # At wrapping: what required grad, the only parameters that DDP ever hears of; all under all names; the modules.
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)
    seen: dict[str, SeenParameter] = field(default_factory=dict)
    submodules: dict[str, nn.Module] = field(default_factory=dict)
    # Tensors that required no grad before the first forward pass, whatever it makes of them, by identity.
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    changed: dict[str, ParameterChange] = field(default_factory=dict)  # in `seen`, by forward passes
    created: dict[str, Location | None] = field(default_factory=dict)  # by a forward pass: DDP has not heard of them
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)  # of the graph of the step before, by identity
    arrivals: Counter[str] = field(default_factory=Counter)  # how many gradients have come to each parameter
    outputs: list[Any] = field(default_factory=list)  # of its forward
    mapped: frozenset[str] = frozenset()  # of a large model, the parameters that are in a file until written to


@dataclass(slots=True)
class TrainingModel:
    """The wrapped model with its optimizer; a new one each time that a module is wrapped."""

    module: nn.Module  # the one in the wrapper
    wrapped: nn.Module  # what `wrap` has returned, and what the loss is called with
    wrapper: nn.Module  # the `DistributedDataParallel` in it; `wrapped` itself where there is none
    optimizer: torch.optim.Optimizer
    facts: WrapperFacts
    trainable: dict[str, nn.Parameter]  # of `module`, what required grad at wrapping
    unregistered: frozenset[str]  # tensors without gradient that `module` held then without having registered them
    settings: tuple[LoopEvent, ...]  # of `fully_shard`, that `wrap` has made
    hooks: tuple[GradientHook, ...]  # that `wrap` has put in the way of gradients
    external_state: ExternalState
    place: DataPlace  # of this rank
    # Under DDP and tensor parallelism: what the parameters are of which it has local tensors, all parameters (DTensors
    # take their place in its forward), and by submodule what plain attributes were that `wrap` has changed.
    parts: dict[str, Part] = field(default_factory=dict)
    held: dict[str, nn.Parameter] = field(default_factory=dict)
    changed_attributes: Sequence[Mapping[str, object]] = ()
    # Of a module that is sharded, from its first step on: of the whole parameters, and of this rank's shards.
    copies: tuple[CopiedOptimizer, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)  # of the "wrapper" and the "inner" module, in this step
    counters: list[Any] = field(default_factory=list)  # handles of the hooks that count them

    @property
    def is_split(self) -> bool:
        """Whether this rank has a part of some parameters only."""
        return self.facts.sharded or bool(self.parts)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters of the wrapped module."""
        return self.held.items() if self.parts else self.module.named_parameters()


@dataclass(slots=True)
class StepData:
    """The step under way."""

    before: ModuleState  # of the module when the step began
    batch: Any = None  # the shard of this rank
    external: list[Restore] = field(default_factory=list)  # the state outside of modules when that was drawn
    local: Gradients = field(default_factory=dict)  # of this rank by itself
    norms: dict[str, float] = field(default_factory=dict)  # of `local`
    missing: list[str] = field(default_factory=list)  # parameters that received no gradient
    numbers: RandomNumbers = "drawn"  # with which `local` was computed
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see `averaged`
    averages_file: Path | None = None  # in which they are, once all ranks have gone on
    scale: dict[str, float] = field(default_factory=dict)  # root mean square of the ranks' norms
    after: ModuleState | None = None  # of the reference module after its forward and backward pass

    @property
    def averaged(self) -> Mapping[str, torch.Tensor]:
        """The mean of the ranks' gradients, where any of them has one."""
        if self.averages_file is not None:
            self.averages, self.averages_file = TensorFile(self.averages_file), None
        return self.averages


@dataclass(slots=True)
class RankState:
    """The state of one rank during a check."""

    recipe: Recipe
    seed: int
    device: torch.device
    rank: int
    world_size: int
    group: Any  # of the check's own; None where there is one rank
    module: nn.Module  # the one that is wrapped
    reference: ReferenceModule  # the one that is not
    origins: Origins  # the lines that made `module` and its parts
    description: ModuleDescription  # of `module` as `model()` has returned it
    arrived_evaluating: bool  # whether that was in eval mode
    syncbn: list[str]  # names of the SyncBatchNorm modules that ran on CPU so far
    stack: contextlib.ExitStack  # is closed with the rank
    large: bool  # whether copies of the module are kept in files
    training_model: TrainingModel = field(init=False)  # from `wrap` on
    step: StepData = field(init=False)

    def seed_of(self, step: int) -> int:
        """The seed of the random numbers that this rank draws in a step."""
        return step_seed(self.seed, step, self.training_model.place.rank)

    def shard_of(self, batch: Any) -> Any:
        """The part of a global batch that this rank works on, as do those that compute one model with it."""
        place = self.training_model.place
        return self.recipe.local_batch(batch, place.rank, place.size)

    def whole(self, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """Tensors of the wrapped model, by name, gathered from their shards; all ranks have to call it."""
        if self.training_model.is_split:
            return gathered(as_wholes(tensors, self.training_model.parts), self.group)
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def rewind(self) -> None:
        """Bring the reference module to what it was when the step began."""
        self.step.before.restore(self.reference.module, self.reference.mapped)

    def own_file(self, file: Path | None, *, shared: bool) -> Path | None:
        """Where this rank has what rank 0 saves to `file`; None for memory, where the model is not large."""
        if not self.large or file is None:
            return None
        return file if shared or not self.rank else this_rank.current().directory / f"{file.name}.{self.rank}"

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
        state.rewind()


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
        state.rewind()
        try:
            return function(step, *args, **kwargs)
        finally:
            state.rewind()
            state.reference.outputs.clear()
            put_back(now)

    return phase
