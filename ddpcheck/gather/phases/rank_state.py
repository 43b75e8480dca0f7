"""State of a rank across the phases of a check, grouped by lifetime.

A phase is a function that a check calls on its ranks through `World.run`; it collects evidence and returns plain data.
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
from ddpcheck.gather.ddp.model_parts import DTensorLayout, ModelReplica, as_dtensors
from ddpcheck.gather.ddp.sharding import gathered
from ddpcheck.gather.state.module_description import Origins
from ddpcheck.gather.state.module_state import ExternalState, ModuleState, Restore
from ddpcheck.gather.state.tensor_file import TensorFile
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.gradient_distance import norm
from ddpcheck.gather.steps.training_step import Gradients, Loss
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.worlds import rank as this_rank

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(slots=True)
class ReferenceModule:
    """Second build of the module, without a wrapper, on which the local steps run."""

    module: nn.Module
    # Set once the wrapper cannot be used any more; this module is trained from then on.
    optimizer: torch.optim.Optimizer | None = None
    # At wrapping: parameters that require grad (all that DDP knows); all parameters by every name; submodules.
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)
    seen: dict[str, SeenParameter] = field(default_factory=dict)
    submodules: dict[str, nn.Module] = field(default_factory=dict)
    # Tensors that required no grad before the first forward pass, by `id`.
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    changed: dict[str, ParameterChange] = field(default_factory=dict)  # parameters of `seen` changed by forward passes
    created: dict[str, Location | None] = field(default_factory=dict)  # created by a forward pass, unknown to DDP
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)  # leaves of the previous step's graph, by `id`
    arrivals: Counter[str] = field(default_factory=Counter)  # gradients accumulated per parameter
    outputs: list[Any] = field(default_factory=list)  # forward outputs
    mapped: frozenset[str] = frozenset()  # parameters of a large model mapped from a file (copy-on-write)


@dataclass(slots=True)
class TrainingModel:
    """Wrapped model with its optimizer; each call of `wrap` creates a new instance."""

    module: nn.Module  # module inside the wrapper
    wrapped: nn.Module  # returned by `wrap`, passed to the loss
    wrapper: nn.Module  # the `DistributedDataParallel` in it, or `wrapped` if none
    optimizer: torch.optim.Optimizer
    facts: WrapperFacts
    trainable: dict[str, nn.Parameter]  # parameters of `module` that required grad at wrapping
    unregistered: frozenset[str]  # names of unregistered state at wrapping
    settings: tuple[LoopEvent, ...]  # `fully_shard` settings made by `wrap`
    hooks: tuple[GradientHook, ...]  # gradient hooks registered by `wrap`
    external_state: ExternalState
    replica: ModelReplica  # of this rank in data parallelism
    # Under DDP with tensor parallelism: placements of local tensors, all parameters (forward replaces them by
    # DTensors), and by submodule the original values of attributes that `wrap` changed.
    parts: dict[str, DTensorLayout] = field(default_factory=dict)
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    changed_attributes: Sequence[Mapping[str, object]] = ()
    # If sharded, set in the first step: optimizer copies for full parameters and for this rank's shards.
    copies: tuple[CopiedOptimizer, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)  # forward calls of "wrapper" and "inner" module in this step
    counters: list[Any] = field(default_factory=list)  # hook handles for `calls`

    @property
    def is_split(self) -> bool:
        """Return True if this rank has only a part of some parameters."""
        return self.facts.sharded or bool(self.parts)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters of the wrapped module."""
        return self.params.items() if self.parts else self.module.named_parameters()


@dataclass(slots=True)
class StepData:
    """Data of the current step on this rank."""

    before: ModuleState  # module state at the start of the step
    batch: Any = None  # the shard of this rank
    restore_external: Restore = lambda: None  # restores the external state as it was after `batch` was drawn
    local: Gradients = field(default_factory=dict)  # local gradients of this rank
    norms: dict[str, float] = field(default_factory=dict)  # norms of `local`
    missing: list[str] = field(default_factory=list)  # parameters that received no gradient
    numbers: RandomNumbers = "drawn"  # random numbers used for `local`
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see `averaged`
    averages_file: Path | None = None  # file of `averages`, opened on first use
    scale: dict[str, float] = field(default_factory=dict)  # RMS of the ranks' norms, by parameter
    after: ModuleState | None = None  # reference module after forward and backward

    def keep(self, gradients: Gradients) -> None:
        """Keep the local gradients of this rank, with their norms."""
        self.local, self.norms = gradients, {name: norm(gradient) for name, gradient in gradients.items()}

    @property
    def averaged(self) -> Mapping[str, torch.Tensor]:
        """Return the mean gradient of each parameter that has a gradient on any rank."""
        if self.averages_file is not None:
            self.averages, self.averages_file = TensorFile(self.averages_file), None
        return self.averages


@dataclass(slots=True)
class RankState:
    """State of one rank during a check."""

    recipe: Recipe
    seed: int
    device: torch.device
    rank: int
    world_size: int
    group: Any  # process group for ddpcheck's own collectives; None if world size is 1
    module: nn.Module  # wrapped module
    reference: ReferenceModule  # never wrapped
    origins: Origins  # lines that created `module` and its parts
    description: ModuleDescription  # of `module` as returned by `model()`
    built_in_eval_mode: bool  # True if `model()` returned it in eval mode
    syncbn: list[str]  # class name of the first SyncBatchNorm run on CPU; else empty
    stack: contextlib.ExitStack  # closed at rank exit
    large: bool  # True if copies of the module are kept in files
    training_model: TrainingModel = field(init=False)  # set by `wrap`
    step: StepData = field(init=False)

    def seed_of(self, step: int) -> int:
        """Return the seed of this rank's random numbers in a step."""
        return training_step.step_seed(self.seed, step, self.training_model.replica.rank)

    def shard_of(self, batch: Any) -> Any:
        """Return this rank's shard of a global batch; tensor-parallel ranks share a shard."""
        replica = self.training_model.replica
        return self.recipe.local_batch(batch, replica.rank, replica.size)

    def full_tensors(self, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """Return full tensors of the wrapped model by name; a collective if `is_split`."""
        if self.training_model.is_split:
            return gathered(as_dtensors(tensors, self.training_model.parts), self.group)
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def rewind(self) -> None:
        """Restore the reference module to the start of the step."""
        self.step.before.restore(self.reference.module, self.reference.mapped)

    def own_file(self, file: Path | None, *, shared: bool) -> Path | None:
        """Return the file for this rank's tensors; None if the model is small.

        If `shared`, every rank uses `file`. Otherwise rank 0 uses `file`, and each other rank "file.<rank>".
        """
        if not self.large or file is None:
            return None
        return file if shared or not self.rank else this_rank.current().directory / f"{file.name}.{self.rank}"

    def global_batch(self, step: int) -> Any:
        return training_step.make_batch(self.recipe, step, seed=self.seed, world_size=self.world_size)

    def gradients(
        self, step: int, module: nn.Module, batch: Any, *, numbers: RandomNumbers = "drawn", phase: str = ""
    ) -> tuple[Gradients, Loss]:
        """Return gradients and loss of `module`; ranks have different seeds if `numbers` is "drawn"."""
        seed = self.seed_of(step) if numbers == "drawn" else training_step.step_seed(self.seed, step)
        return training_step.compute_gradients(
            self.recipe, module, batch, step=step, seed=seed, numbers=numbers, phase=phase
        )

    def run_loss(self, step: int, phase: str = "", module: nn.Module | None = None) -> Loss:
        """Return the loss of `module` (default: the reference) on this rank's shard; see `compute_loss`."""
        module = self.reference.module if module is None else module  # len() of a compiled DDP raises
        seed = self.seed_of(step)
        return training_step.compute_loss(self.recipe, module, self.step.batch, step=step, seed=seed, phase=phase)


def rank_state() -> RankState:
    state: RankState = this_rank.state["check"]
    return state


def recover() -> None:
    """Restore the reference module to the start of the step after an error."""
    state = rank_state()
    state.reference.outputs.clear()
    if hasattr(state, "step"):
        state.rewind()


def replays_step(
    function: Callable[Concatenate[int, Arguments], Result],
) -> Callable[Concatenate[int, Arguments], Result]:
    """Decorate a phase that replays the current step on the reference module.

    Before and after the phase, restores the module, and `ExternalState` (variables outside the module), to the start of
    the step.
    """

    @functools.wraps(function)
    def phase(step: int, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        state = rank_state()
        with state.training_model.external_state.restored():
            state.step.restore_external()
            state.rewind()
            try:
                return function(step, *args, **kwargs)
            finally:
                state.rewind()
                state.reference.outputs.clear()

    return phase
