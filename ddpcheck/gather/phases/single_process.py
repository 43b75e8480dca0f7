"""Single-process baseline: the unwrapped module on the global batch, also in float64.

Runs without a process group; DDP training should be equivalent.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.gradients import Difference, RandomNumbers, SingleStep
from ddpcheck.gather.ddp.loop_events import count_backwards
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state import module_state
from ddpcheck.gather.state.fingerprints import shape_of
from ddpcheck.gather.state.randomness import make_deterministic, seed_everything
from ddpcheck.gather.state.tensor_file import TensorFile, TensorWriter, is_large, kept_in_file
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.gradient_distance import dense, difference, distance, fit, norm, scales, tolerances
from ddpcheck.gather.steps.training_step import Gradients, Loss, batch_fingerprint, compute_gradients, step_seed
from ddpcheck.recipe.pytree import to_device, tree_map, upcast
from ddpcheck.recipe.recipe import Recipe, error_summary
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.compilation import run_eagerly

HANDOVER = "module.pickle"
"""File in the directory of the ranks in which rank 0 saves the module if `wrap` changed its structure."""

_LARGEST_BY_CHANGE = 1e-3  # relative to all gradients; larger differences are not rounding
_LARGEST_TOLERANCE = 0.1  # well below the smallest bug measured, a relative error of 0.5


@dataclass(slots=True)
class SingleStepData:
    """Data of the current step of the single process."""

    before: module_state.ModuleState  # module state at the start of the step
    restore_external: module_state.Restore  # restores the external state at the start of the step
    loss: float = 0.0  # on the global batch
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)  # reference for relative errors, by parameter
    tolerance: dict[str, float] = field(default_factory=dict)  # relative error allowed as rounding, by parameter


@dataclass(slots=True)
class SingleProcess:
    """State of the single process from step to step."""

    recipe: Recipe
    module: nn.Module
    double: nn.Module | None  # float64 copy of `module`
    double_error: str  # error if `double` is None
    device: torch.device
    seed: int
    world_size: int  # world size of the compared ranks
    stack: contextlib.ExitStack  # closed at process exit
    external_state: module_state.ExternalState
    mapped: frozenset[str]  # parameters of a large model mapped from a file (copy-on-write)
    numbers: RandomNumbers = "drawn"  # if forward draws: another value, which ranks can reproduce
    after: module_state.ModuleState | None = None  # module attributes after the last step's forward passes
    step: SingleStepData = field(init=False)

    def global_batch(self, step: int) -> Any:
        return training_step.make_batch(self.recipe, step, seed=self.seed, world_size=self.world_size)

    def rewind(self, module: nn.Module) -> None:
        """Restore `module` and external state to the start of the step."""
        self.step.before.restore(module, self.mapped)
        self.step.restore_external()

    def gradients(self, module: nn.Module, batch: Any, step: int) -> tuple[Gradients, Loss]:
        seed, phase = step_seed(self.seed, step), "single process, "
        return compute_gradients(self.recipe, module, batch, step=step, seed=seed, numbers=self.numbers, phase=phase)


def start(target: str | Recipe, seed: int, world_size: int) -> None:
    """Load the recipe and build the module and its float64 copy."""
    run_eagerly()
    recipe = load_on_rank(target)
    device = torch.device(this_rank.current().device)
    make_deterministic(device)

    def build() -> nn.Module:
        this_rank.set_status("building the model")
        seed_everything(training_step.model_seed(seed))
        module = module_state.move_to_device(recipe.build_model(), device)
        into_training(module)
        return module

    stack = contextlib.ExitStack()
    if device.type == "cpu":
        stack.enter_context(synchronised_on_cpu())
    module = build()
    mapped = _move_large_to_file(module)
    double, error = None, ""
    if any(p.dtype != torch.float64 for p in module.parameters() if p.is_floating_point()):
        try:
            double = build()
            shared = {id(p) for p in module.parameters()} & {id(p) for p in double.parameters()}
            double = _to_double(module_state.copied_module(double) if shared else double, mapped)
        except Exception as failure:
            error = error_summary(failure)
    external = _external_state(recipe, module, double)
    this_rank.state["single"] = SingleProcess(
        recipe, module, double, error, device, seed, world_size, stack, external, mapped
    )


def _move_large_to_file(module: nn.Module) -> frozenset[str]:
    file = this_rank.current().directory / "built"
    return module_state.move_to_file(module, file) if is_large(module) else frozenset()


def _to_double(module: nn.Module, mapped: Collection[str]) -> nn.Module:
    module_state.free_parameters(module, mapped, torch.float64)  # first: mapped parameters are read from a file
    return module.double()


def _external_state(recipe: Recipe, module: nn.Module, double: nn.Module | None) -> module_state.ExternalState:
    return module_state.ExternalState((recipe.loss, recipe.shard, recipe.optimizer), module, [id(module), id(double)])


def join_single_process_group() -> None:
    """Create a process group of world size 1 for models that need one."""
    store = dist.FileStore(str(this_rank.current().directory / "alone"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def adopt(module_file: Path) -> None:
    """Replace the single process's module by rank 0's module, saved in `module_file` after `wrap`."""
    single: SingleProcess = this_rank.state["single"]
    single.module = wire.loads(module_file.read_bytes()).to(single.device)
    single.mapped = _move_large_to_file(single.module)
    if single.double is not None:
        single.double = _to_double(module_state.copied_module(single.module), single.mapped)
    single.after, single.external_state = None, _external_state(single.recipe, single.module, single.double)


def run_step(step: int, state_file: Path | None) -> SingleStep | str:
    """Compute the gradients of the global batch, in native dtype and in float64.

    `state_file` has rank 0's state before the step; None if the module already has the same state. If the model that
    the recipe builds here differs from the model on rank 0, the result is a string that describes the first difference.
    """
    single: SingleProcess = this_rank.state["single"]
    if single.after is not None:
        single.after.restore(single.module)  # keep counters and caches of earlier forward passes
    if step == 0 and state_file is not None and (differs := _model_mismatch(single.module, TensorFile(state_file))):
        return differs
    if state_file is not None:
        module_state.ModuleState(TensorFile(state_file), file=state_file).restore(single.module, single.mapped)
    last = single.step.before if hasattr(single, "step") else None
    if single.mapped and state_file is not None:
        before = module_state.capture_state(single.module, parameters=False)
        before.tensors, before.file = {**TensorFile(state_file), **before.tensors}, state_file
    else:
        before = module_state.capture_state(single.module, into=last)
    single.step = SingleStepData(before, single.external_state.capture())
    return _measure_step(single, step)


def _model_mismatch(module: nn.Module, rank0_tensors: Mapping[str, torch.Tensor]) -> str:
    for name, parameter in module.named_parameters():
        if name not in rank0_tensors:
            return f"{name} is missing on rank 0"
        if (rank0_shape := shape_of(rank0_tensors[name])) != (shape := shape_of(parameter)):
            return f"{name} has the shape {shape}, and {rank0_shape} on rank 0"
    return ""


def run_with_constants(step: int) -> SingleStep:
    """Repeat the step with constants instead of random numbers; later steps use constants, too."""
    single: SingleProcess = this_rank.state["single"]
    single.numbers = "constant"
    single.rewind(single.module)
    return _measure_step(single, step)


def _measure_step(single: SingleProcess, step: int) -> SingleStep:
    data = single.step
    batch = single.global_batch(step)
    rebuilt = batch_fingerprint(single.global_batch(step)) if step == 0 else ()
    on_device = to_device(batch, single.device)
    gradients, loss, backwards = _comparable_gradients(single, on_device, step)
    single.after = module_state.capture_state(single.module, parameters=False, buffers=False)
    data.loss = loss.value
    del loss
    training_step.clear_gradients(single.module)
    data.gradients = gradients
    if single.mapped:
        data.gradients = kept_in_file(gradients.items(), this_rank.current().directory / "gradients")
        gradients.clear()
    del gradients
    with single.external_state.restored():
        noise = _rounding_norms(single, on_device, step, single.mapped if backwards == 1 else ())
    data.scale = scales(data.gradients)
    data.tolerance = tolerances(data.gradients, data.scale, noise)
    if single.double_error:  # the only estimate without float64
        with single.external_state.restored():
            measured = tolerances(data.gradients, data.scale, _rounding_by_perturbation(single, on_device, step))
        data.tolerance = {name: max(measured[name], allowed) for name, allowed in data.tolerance.items()}
    total = sum(norm(gradient) ** 2 for gradient in data.gradients.values()) ** 0.5
    if single.double is not None:
        module_state.free_parameters(single.double, single.mapped)  # until the next `rewind`
    return SingleStep(
        data.loss, total, batch_fingerprint(batch), rebuilt, single.double_error, backwards, single.numbers
    )


def _comparable_gradients(single: SingleProcess, batch: Any, step: int) -> tuple[Gradients, Loss, int]:
    """Return gradients of the global batch, with random numbers that ranks can reproduce."""
    while True:
        try:
            with count_backwards() as backwards:
                gradients, loss = single.gradients(single.module, batch, step)
        except Exception:
            if single.numbers != "by sample":
                raise
            single.numbers = "constant"
        else:
            if not loss.drew or single.numbers != "drawn":
                return gradients, loss, backwards[0]
            single.numbers = "by sample"
        single.rewind(single.module)


def _rounding_norms(single: SingleProcess, batch: Any, step: int, streamed: Collection[str]) -> dict[str, float] | None:
    """Return the norm of each gradient's rounding error, against float64; None if unknown.

    The float64 gradients of parameters in `streamed` are written to a file, so that only one is in memory at a time.
    """
    gradients = single.step.gradients
    if single.double is None:
        return None if single.double_error else dict.fromkeys(gradients, 0.0)
    single.rewind(single.double)
    try:
        exact = _exact_gradients(single, single.double, upcast(batch), step, streamed)
    except UsageError:
        raise
    except Exception as error:  # the model may not run in float64
        single.double_error = error_summary(error)
        single.double = None
        return None
    return {name: distance(gradient, exact[name]) for name, gradient in gradients.items() if name in exact}


def _exact_gradients(
    single: SingleProcess, double: nn.Module, batch: Any, step: int, streamed: Collection[str]
) -> Mapping[str, torch.Tensor]:
    if not streamed:
        return single.gradients(double, batch, step)[0]
    file = this_rank.current().directory / "exact"
    with TensorWriter(file) as writer, contextlib.ExitStack() as stack:

        def write_gradient(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # may run more than once per backward
                earlier, gradient = writer.get(name), dense(parameter.grad)
                writer.add(name, gradient if earlier is None else earlier + gradient)
                parameter.grad = None

        for name, parameter in double.named_parameters():
            if name in streamed and parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(write_gradient, name)).remove)
        for name, gradient in single.gradients(double, batch, step)[0].items():
            writer.add(name, gradient)
    exact = TensorFile(file)
    shutil.rmtree(file)
    return exact


def _rounding_by_perturbation(single: SingleProcess, batch: Any, step: int) -> dict[str, float]:
    """Return how far gradients move if parameters and batch change by machine epsilon.

    All values are 0 if the gradients change too much for rounding. Rounding errors are equivalent to such perturbations
    (backward error analysis: N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.5).
    """
    gradients = single.step.gradients
    zeros = dict.fromkeys(gradients, 0.0)
    generator = torch.Generator().manual_seed(step_seed(single.seed, step))

    def perturbed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype) * 2 - 1
        return leaf.detach() * (1 + torch.finfo(leaf.dtype).eps * signs)

    single.rewind(single.module)
    try:
        with torch.no_grad():
            for parameter in single.module.parameters():
                parameter.copy_(perturbed(parameter))
        changed, _ = single.gradients(single.module, tree_map(perturbed, batch), step)
    except Exception:  # the model may reject perturbed inputs
        return zeros
    finally:
        single.rewind(single.module)
    errors = {name: distance(gradient, changed[name]) for name, gradient in gradients.items() if name in changed}
    largest = _LARGEST_BY_CHANGE * math.hypot(*single.step.scale.values())
    return zeros if len(errors) < len(gradients) or math.hypot(*errors.values()) > largest else errors


def compare_with(gradient_file: Path, trained: Sequence[str]) -> tuple[Difference, ...]:
    """Compare the ranks' averaged gradients with the gradients of the last `run_step`.

    `trained`: names of the parameters that require grad on the ranks. Only these parameters are compared, and only if
    they require grad here: the wrapper may have frozen or added parameters.
    """
    single: SingleProcess = this_rank.state["single"]
    data = single.step
    averaged = TensorFile(gradient_file, device=single.device)
    trainable = {name for name, p in single.module.named_parameters() if p.requires_grad}
    names = [name for name in trained if name in trainable and (name in data.gradients or name in averaged)]
    allowed = dict(data.tolerance)
    noisy = [n for n in names if allowed.get(n, 0.0) > _LARGEST_TOLERANCE and n in averaged and n in data.gradients]
    # If rounding is too large to compare single values, a common factor of all values is still detectable: its
    # rounding error shrinks with the number of values.
    if noisy:
        ratio, residual = fit({name: averaged[name] for name in noisy}, [data.gradients])
        numbers = sum(averaged[name].numel() for name in noisy)
        least = max(_LARGEST_TOLERANCE, max(allowed[name] for name in noisy) / math.sqrt(numbers))
        if abs(ratio[0] - 1) > least and residual < abs(ratio[0] - 1) / 2:
            allowed.update(dict.fromkeys(noisy, _LARGEST_TOLERANCE))
    return tuple(
        difference(
            name,
            averaged.get(name),
            data.gradients.get(name),
            scale=data.scale.get(name, 0.0),
            tolerance=allowed.get(name, 1e-5),
        )
        for name in names
    )
