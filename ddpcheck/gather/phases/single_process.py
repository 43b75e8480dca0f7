"""The single process: the unwrapped module on the whole global batch, in its own dtype and in float64.

Everything here runs in a process without a process group, which is what the user wants training to equal.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.gradients import Difference, RandomNumbers, SingleStep
from ddpcheck.gather.ddp.loop_events import counted_backwards
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state.external_state import ExternalState, Restore, put_back
from ddpcheck.gather.state.fingerprints import shape_of
from ddpcheck.gather.state.module_state import (
    ModuleState,
    capture_attributes,
    capture_state,
    copied_module,
    move_to_file,
    moved,
    release,
)
from ddpcheck.gather.state.randomness import seed_everything, settle_device
from ddpcheck.gather.state.tensor_file import TensorFile, TensorWriter, is_large, kept_in_file
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.gradient_distance import dense, difference, distance, fit, norm, scales, tolerances
from ddpcheck.gather.steps.training_step import (
    Gradients,
    Loss,
    batch_fingerprint,
    clear_gradients,
    compute_gradients,
    make_batch,
    model_seed,
    step_seed,
)
from ddpcheck.recipe.pytree import to_device, tree_map, upcast
from ddpcheck.recipe.recipe import Recipe, summary
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.compilation import run_as_written

HANDOVER = "module.pickle"
"""The file in the ranks' world in which rank 0 leaves the module where `wrap` has made another one of it."""

_LARGEST_BY_CHANGE = 1e-3  # of all gradients together; more than that is no rounding
_LARGEST_TOLERANCE = 0.1  # well below the smallest fault that was measured, a relative error of 0.5


@dataclass(slots=True)
class SingleStepData:
    """The step under way in the single process."""

    before: ModuleState  # of the module when the step began
    external: list[Restore]  # the state outside of modules then
    loss: float = 0.0  # of the global batch
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)  # that relative errors are measured by
    tolerance: dict[str, float] = field(default_factory=dict)  # the relative error that may be rounding


@dataclass(slots=True)
class SingleProcess:
    """The state of the single process from step to step."""

    recipe: Recipe
    module: nn.Module
    double: nn.Module | None  # a copy of it in float64
    double_error: str  # why there is none
    device: torch.device
    seed: int
    world_size: int  # of the ranks that it is compared with
    stack: contextlib.ExitStack  # is closed with the process
    external_state: ExternalState
    mapped: frozenset[str]  # of a large model, the parameters in a file until written to; in float64 made of it
    numbers: RandomNumbers = "drawn"  # otherwise those that can be compared, since forward draws some
    after: ModuleState | None = None  # what the forward passes of the last step have left
    step: SingleStepData = field(init=False)

    def rewind(self, module: nn.Module) -> None:
        """Bring `module`, and what the recipe keeps outside of it, to what they were when the step began."""
        self.step.before.restore(module, self.mapped)
        put_back(self.step.external)

    def forget_double(self) -> None:
        """Let go of the parameters in float64 until the next `rewind`."""
        if self.double is not None:
            release(self.double, self.mapped)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A block that runs the step again: what the recipe keeps is afterwards what it is now."""
        now = self.external_state.capture()
        try:
            yield
        finally:
            put_back(now)


def start(target: str | Recipe, seed: int, world_size: int) -> None:
    """Load the recipe and build the module, and a copy of it in float64."""
    run_as_written()
    recipe = load_on_rank(target)
    device = torch.device(this_rank.current().device)
    settle_device(device)

    def build() -> nn.Module:
        this_rank.set_status("building the model")
        seed_everything(model_seed(seed))
        module = moved(recipe.build_model(), device)
        into_training(module)
        return module

    stack = contextlib.ExitStack()
    if device.type == "cpu":
        stack.enter_context(synchronised_on_cpu())
    module = build()
    mapped = _in_file(module)
    double, error = None, ""
    if any(p.dtype != torch.float64 for p in module.parameters() if p.is_floating_point()):
        try:
            double = build()
            shared = {id(p) for p in module.parameters()} & {id(p) for p in double.parameters()}
            double = _in_double(copied_module(double) if shared else double, mapped)
        except Exception as failure:
            error = summary(failure)
    external = _external_state(recipe, module, double)
    this_rank.state["single"] = SingleProcess(
        recipe, module, double, error, device, seed, world_size, stack, external, mapped
    )


def _in_file(module: nn.Module) -> frozenset[str]:
    return move_to_file(module, this_rank.current().directory / "built") if is_large(module) else frozenset()


def _in_double(module: nn.Module, mapped: Collection[str]) -> nn.Module:
    release(module, mapped, torch.float64)  # first: what is mapped gets its values from a file
    return module.double()


def _external_state(recipe: Recipe, module: nn.Module, double: nn.Module | None) -> ExternalState:
    return ExternalState((recipe.loss, recipe.shard, recipe.optimizer), module, [id(module), id(double)])


def join_alone() -> None:
    """Make a process group of one, for models that cannot run without any."""
    store = dist.FileStore(str(this_rank.current().directory / "alone"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def adopt(module_file: Path) -> None:
    """Go on with the module that `wrap` has made on rank 0, and a copy of it in float64."""
    own: SingleProcess = this_rank.state["single"]
    own.module = wire.loads(module_file.read_bytes()).to(own.device)
    own.mapped = _in_file(own.module)
    own.double = _in_double(copied_module(own.module), own.mapped) if own.double is not None else None
    own.after, own.external_state = None, _external_state(own.recipe, own.module, own.double)


def run_step(step: int, state_file: Path | None) -> SingleStep | str:
    """Compute the gradients of the global batch of `step`, in the module's dtype and in float64.

    `state_file` has rank 0's state before the step; it is None where the module's own state is the same.

    Returns:
        Or what differs, where the recipe makes another model in one process than on several ranks.
    """
    own: SingleProcess = this_rank.state["single"]
    if own.after is not None:
        own.after.restore(own.module)  # what its own forward passes have counted and kept goes on
    if step == 0 and state_file is not None and (differs := _other_model(own.module, TensorFile(state_file))):
        return differs
    if state_file is not None:
        ModuleState(TensorFile(state_file), file=state_file).restore(own.module, own.mapped)
    last = own.step.before if hasattr(own, "step") else None
    if own.mapped and state_file is not None:
        before = capture_attributes(own.module, buffers=True)
        before.tensors, before.file = {**TensorFile(state_file), **before.tensors}, state_file
    else:
        before = capture_state(own.module, into=last)
    own.step = SingleStepData(before, own.external_state.capture())
    return _run(own, step)


def _other_model(module: nn.Module, of_rank: Mapping[str, torch.Tensor]) -> str:
    """The first parameter that rank 0 does not have, or of another shape: a part of a model of all ranks, say."""
    for name, parameter in module.named_parameters():
        if name not in of_rank:
            return f"{name} is missing on rank 0"
        if (there := shape_of(of_rank[name])) != (here := shape_of(parameter)):
            return f"{name} has the shape {here}, and {there} on rank 0"
    return ""


def run_with_constants(step: int) -> SingleStep:
    """The step under way again, and all later ones, with constants in the place of random numbers."""
    own: SingleProcess = this_rank.state["single"]
    own.numbers = "constant"
    own.rewind(own.module)
    return _run(own, step)


def _run(own: SingleProcess, step: int) -> SingleStep:
    data = own.step
    batch = make_batch(own.recipe, step, seed=own.seed, world_size=own.world_size)
    again = (
        batch_fingerprint(make_batch(own.recipe, step, seed=own.seed, world_size=own.world_size)) if step == 0 else ()
    )
    on_device = to_device(batch, own.device)
    gradients, loss, backwards = _comparable_gradients(own, on_device, step)
    own.after = capture_attributes(own.module, buffers=False)
    data.loss = loss.value
    del loss
    clear_gradients(own.module)
    data.gradients = gradients
    if own.mapped:
        data.gradients = kept_in_file(gradients.items(), this_rank.current().directory / "gradients")
        gradients.clear()
    del gradients
    with own.aside():
        noise = _rounding(own, on_device, step, own.mapped if backwards == 1 else ())
    data.scale = scales(data.gradients)
    data.tolerance = tolerances(data.gradients, data.scale, noise)
    if own.double_error:  # the only yardstick there is without float64
        with own.aside():
            measured = tolerances(data.gradients, data.scale, _rounding_by_change(own, on_device, step))
        data.tolerance = {name: max(measured[name], allowed) for name, allowed in data.tolerance.items()}
    total = sum(norm(gradient) ** 2 for gradient in data.gradients.values()) ** 0.5
    own.forget_double()
    return SingleStep(data.loss, total, batch_fingerprint(batch), again, own.double_error, backwards, own.numbers)


def _comparable_gradients(own: SingleProcess, batch: Any, step: int) -> tuple[Gradients, Loss, int]:
    """Those of the module, with random numbers that a rank can have as well; and the backward passes that it took."""
    while True:
        try:
            with counted_backwards() as backwards:
                gradients, loss = _gradients(own, own.module, batch, step)
        except Exception:
            if own.numbers != "by sample":
                raise
            own.numbers = "constant"
        else:
            if not loss.drew or own.numbers != "drawn":
                return gradients, loss, backwards[0]
            own.numbers = "by sample"
        own.rewind(own.module)


def _gradients(own: SingleProcess, module: nn.Module, batch: Any, step: int) -> tuple[Gradients, Loss]:
    seed = step_seed(own.seed, step)
    place = "single process, "
    return compute_gradients(own.recipe, module, batch, step=step, seed=seed, numbers=own.numbers, place=place)


def _rounding(own: SingleProcess, batch: Any, step: int, streamed: Collection[str]) -> dict[str, float] | None:
    """By parameter, the norm of what the module's own dtype loses to rounding; None where that cannot be known.

    Gradients in float64 of parameters called as in `streamed` are in memory one at a time.
    """
    gradients = own.step.gradients
    if own.double is None:
        return None if own.double_error else dict.fromkeys(gradients, 0.0)
    own.rewind(own.double)
    try:
        exact = _exact_gradients(own, own.double, upcast(batch), step, streamed)
    except UsageError:
        raise
    except Exception as error:  # a model that insists on its dtype: there is no yardstick then
        own.double_error = summary(error)
        own.double = None
        return None
    return {name: distance(gradient, exact[name]) for name, gradient in gradients.items() if name in exact}


def _exact_gradients(
    own: SingleProcess, double: nn.Module, batch: Any, step: int, streamed: Collection[str]
) -> Mapping[str, torch.Tensor]:
    if not streamed:
        return _gradients(own, double, batch, step)[0]
    file = this_rank.current().directory / "exact"
    with TensorWriter(file) as writer, contextlib.ExitStack() as stack:

        def leave(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # and not the first one where backward comes here more than once
                earlier, gradient = writer.get(name), dense(parameter.grad)
                writer.add(name, gradient if earlier is None else earlier + gradient)
                parameter.grad = None

        for name, parameter in double.named_parameters():
            if name in streamed and parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(partial(leave, name)).remove)
        for name, gradient in _gradients(own, double, batch, step)[0].items():
            writer.add(name, gradient)
    exact = TensorFile(file)
    shutil.rmtree(file)
    return exact


def _rounding_by_change(own: SingleProcess, batch: Any, step: int) -> dict[str, float]:
    """By parameter, how far its gradient moves with the last digit of parameters and batch; zeros where that is more.

    Rounding on the way does no more than such a change of what goes in (backward error analysis: N. Higham, Accuracy
    and Stability of Numerical Algorithms, 2002, section 1.5).
    """
    gradients = own.step.gradients
    nothing = dict.fromkeys(gradients, 0.0)
    generator = torch.Generator().manual_seed(step_seed(own.seed, step))

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype) * 2 - 1
        return leaf.detach() * (1 + torch.finfo(leaf.dtype).eps * signs)

    own.rewind(own.module)
    try:
        with torch.no_grad():
            for parameter in own.module.parameters():
                parameter.copy_(moved(parameter))
        again, _ = _gradients(own, own.module, tree_map(moved, batch), step)
    except Exception:  # a model that insists on the values of its batch
        return nothing
    finally:
        own.rewind(own.module)
    found = {name: distance(gradient, again[name]) for name, gradient in gradients.items() if name in again}
    largest = _LARGEST_BY_CHANGE * math.hypot(*own.step.scale.values())
    return nothing if len(found) < len(gradients) or math.hypot(*found.values()) > largest else found


def compare_with(gradient_file: Path, trained: Sequence[str]) -> tuple[Difference, ...]:
    """The averaged gradients of the ranks against those of the last `run_step`.

    `trained` require grad on the ranks: what a wrapper has frozen or added is not compared.
    """
    own: SingleProcess = this_rank.state["single"]
    data = own.step
    averaged = TensorFile(gradient_file, device=own.device)
    here = {name for name, p in own.module.named_parameters() if p.requires_grad}
    names = [name for name in trained if name in here and (name in data.gradients or name in averaged)]
    allowed = dict(data.tolerance)
    noisy = [n for n in names if allowed.get(n, 0.0) > _LARGEST_TOLERANCE and n in averaged and n in data.gradients]
    # Where so much is lost to rounding that single numbers tell nothing, a factor common to all is seen all the same:
    # the more numbers, the less of it is rounding, which may be of any size in one that should be zero.
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
