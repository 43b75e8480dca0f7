"""The single process: the unwrapped module on the whole global batch, in its own dtype and in float64.

Everything here runs in a process without a process group, which is what the user wants training to equal.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck import rank as this_rank
from ddpcheck.evidence import Difference, ShardAnalysis, SingleStep
from ddpcheck.gather.compare import difference, eps_of, fit, norm, scales, tolerances
from ddpcheck.gather.describe import fingerprint
from ddpcheck.gather.randomness import QuietRandomness, mixed_seed, quiet_modules, seed_everything, settle_device
from ddpcheck.gather.stepping import (
    Gradients,
    ModuleState,
    capture_attributes,
    capture_state,
    clear_gradients,
    compute_gradients,
    compute_loss,
    gradients_of,
)
from ddpcheck.gather.syncbn import synchronised_on_cpu
from ddpcheck.graph import named_parameters
from ddpcheck.nests import iter_tensors, to_device, upcast
from ddpcheck.recipe import Recipe, summary
from ddpcheck.target import load_target

_BATCH_SEED, _MODEL_SEED, _STEP_SEED = 1, 2, 3
_LARGEST_TOLERANCE = 0.1  # well below the smallest fault that was measured, a relative error of 0.5
_COUPLED_EXACTLY = 1e-9  # relative; parts of a float64 run may be in float32, and are the same row by row
_LARGEST_ROUNDING = 0.01  # of what may be put down to rounding where float64 tells it
_MOST_ELEMENTS = 1 << 28  # of the gradients of all shards together
_MOST_TERMS = 8


def model_seed(seed: int) -> int:
    """The seed under which `model()` is called."""
    return mixed_seed(seed, _MODEL_SEED)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of the random numbers that a rank draws in a step; a single process draws as rank 0."""
    return mixed_seed(seed, _STEP_SEED, step, rank)


def make_batch(recipe: Recipe, step: int, *, seed: int) -> Any:
    """The global batch of `step`, made under a seed of its own."""
    this_rank.set_place(f"step {step}: batch")
    seed_everything(mixed_seed(seed, _BATCH_SEED, step))
    return recipe.global_batch(step)


def batch_fingerprint(batch: Any) -> tuple[int, ...]:
    """Tells whether two processes hold the same batch."""
    return tuple(fingerprint(tensor) for tensor in iter_tensors(batch))


@dataclass(slots=True)
class SingleProcess:
    """What the process keeps from step to step."""

    recipe: Recipe
    module: nn.Module
    double: nn.Module | None
    device: torch.device
    seed: int
    draws: bool = False
    double_trouble: str = ""
    state: ModuleState | None = None
    after: ModuleState | None = None
    loss: float = 0.0
    gradients: Gradients = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def start(target: str | Recipe, seed: int) -> None:
    """Load the recipe and build the module, and a copy of it in float64."""
    recipe = load_target(target) if isinstance(target, str) else target
    device = torch.device(this_rank.current().device)
    settle_device(device)

    def build() -> nn.Module:
        this_rank.set_place("building the model")
        seed_everything(model_seed(seed))
        return recipe.build_model().to(device)

    stack = contextlib.ExitStack()
    if device.type == "cpu":
        stack.enter_context(synchronised_on_cpu())
    module = build()
    double, trouble = None, ""
    if any(p.dtype != torch.float64 for p in module.parameters() if p.is_floating_point()):
        try:
            double = build()
            shared = {id(p) for p in module.parameters()} & {id(p) for p in double.parameters()}
            double = (copy.deepcopy(double) if shared else double).double()
        except Exception as error:
            trouble = summary(error)
    single = SingleProcess(recipe, module, double, device, seed, double_trouble=trouble, stack=stack)
    this_rank.state["single"] = single


def join_alone() -> None:
    """Make a process group of one, for models that cannot run without any."""
    store = dist.FileStore(str(this_rank.current().directory / "alone"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def run_step(step: int, state_file: Path | None) -> SingleStep:
    """Compute the gradients of the global batch of `step`, in the module's dtype and in float64.

    Args:
        step: Counted from 0.
        state_file: Where rank 0 has put its state before the step; None where the module's own state is the same.
    """
    own: SingleProcess = this_rank.state["single"]
    if own.after is not None:
        own.after.restore(own.module)  # what its own forward passes have counted and kept goes on
    if state_file is not None:
        saved = torch.load(state_file, map_location=own.device, weights_only=True, mmap=True)
        ModuleState(saved).restore(own.module)
    own.state = capture_state(own.module, into=own.state)
    batch = make_batch(own.recipe, step, seed=own.seed)
    again = batch_fingerprint(make_batch(own.recipe, step, seed=own.seed)) if step == 0 else ()
    on_device = to_device(batch, own.device)
    gradients, loss = _gradients(own, own.module, on_device, step)
    if loss.drew and not own.draws:
        own.draws = True
        own.state.restore(own.module)
        gradients, loss = _gradients(own, own.module, on_device, step)
    own.after = capture_attributes(own.module, buffers=False)
    own.loss = value = loss.value
    del loss
    noise = _rounding(own, on_device, step, gradients)
    own.gradients = gradients
    own.scale = scales(gradients)
    own.tolerance = tolerances(gradients, own.scale, noise)
    total = sum(norm(gradient) ** 2 for gradient in gradients.values()) ** 0.5
    return SingleStep(value, total, batch_fingerprint(batch), again, own.draws, own.double_trouble)


def _gradients(own: SingleProcess, module: nn.Module, batch: Any, step: int) -> tuple[Gradients, Any]:
    seed = step_seed(own.seed, step)
    return compute_gradients(own.recipe, module, batch, step=step, seed=seed, quiet=own.draws, place="single process, ")


def _rounding(own: SingleProcess, batch: Any, step: int, gradients: Gradients) -> dict[str, float] | None:
    """By parameter, the norm of what the module's own dtype loses to rounding; None where that cannot be known."""
    if own.double is None:
        return None if own.double_trouble else dict.fromkeys(gradients, 0.0)
    assert own.state is not None
    own.state.restore(own.double)
    try:
        exact, _ = _gradients(own, own.double, upcast(batch), step)
    except Exception as error:  # a model that insists on its dtype: there is no yardstick then
        own.double_trouble = summary(error)
        own.double = None
        return None
    return {name: norm(gradient.double() - exact[name]) for name, gradient in gradients.items() if name in exact}


def compare_with(gradient_file: Path, trained: Sequence[str]) -> tuple[Difference, ...]:
    """The averaged gradients of the ranks against those of the last `run_step`.

    Args:
        gradient_file: Where rank 0 has put them.
        trained: The parameters that require grad on the ranks; what a wrapper has frozen or added is not compared.
    """
    own: SingleProcess = this_rank.state["single"]
    averaged: Gradients = torch.load(gradient_file, map_location=own.device, weights_only=True, mmap=True)
    here = {name for name, p in own.module.named_parameters() if p.requires_grad}
    names = [name for name in trained if name in here and (name in own.gradients or name in averaged)]
    allowed = dict(own.tolerance)
    noisy = [n for n in names if allowed.get(n, 0.0) > _LARGEST_TOLERANCE and n in averaged and n in own.gradients]
    if (
        noisy
    ):  # so much is lost to rounding that single numbers tell nothing; a factor common to all is seen all the same
        ratio, residual = fit({name: averaged[name] for name in noisy}, [own.gradients])
        if abs(ratio[0] - 1) > _LARGEST_TOLERANCE and residual < abs(ratio[0] - 1) / 2:
            allowed.update(dict.fromkeys(noisy, _LARGEST_TOLERANCE))
    return tuple(
        difference(
            name,
            averaged.get(name),
            own.gradients.get(name),
            scale=own.scale.get(name, 0.0),
            tolerance=allowed.get(name, 1e-5),
        )
        for name in names
    )


# Why it differs


def analyse(step: int, gradient_file: Path, world_size: int) -> ShardAnalysis:
    """Run the shards one by one without a process group, to tell coupling from normalisation and from the world.

    Returns:
        What could be measured: where a shard cannot be run here, only what the global batch tells.
    """
    own: SingleProcess = this_rank.state["single"]
    averaged: Gradients = torch.load(gradient_file, map_location=own.device, weights_only=True, mmap=True)
    compared = {name: averaged[name] for name in own.gradients if name in averaged}
    global_ratio, global_residual = fit(compared, [own.gradients])
    found = ShardAnalysis(global_ratio=global_ratio[0], global_residual=global_residual, global_loss=own.loss)
    size = sum(gradient.numel() for gradient in own.gradients.values())
    if own.state is None or world_size * size > _MOST_ELEMENTS:
        return found
    batch = to_device(make_batch(own.recipe, step, seed=own.seed), own.device)
    try:
        shards = [own.recipe.local_batch(batch, rank, world_size) for rank in range(world_size)]
        parts, losses = _gradients_by_shard(own, own.module, shards, step)
    except Exception:  # a model that insists on its batch size, say
        return found
    terms = [term for of_shard in parts for term in of_shard]
    mean: Gradients = {}
    for name in own.gradients:
        mean[name] = torch.stack([term[name] for term in terms]).sum(0) / world_size
    world_ratio, world_residual = fit({name: averaged[name] for name in compared}, [mean])
    weights, weights_residual = fit(own.gradients, terms)
    summed = [{name: torch.stack([t[name] for t in part]).sum(0) for name in own.gradients} for part in parts]
    rank_weights, rank_residual = fit(compared, summed)
    rounded: tuple[str, ...] = ()
    with contextlib.suppress(Exception):  # as above, in float64
        rounded = _rounded(own, averaged, mean, batch, shards, step)
    name, kind = "", ""
    with contextlib.suppress(Exception):  # what a forward returns may be anything
        name, kind = _first_coupled_module(own, batch, shards, step)
    own.state.restore(own.module)
    return replace(
        found,
        weights=tuple(weights),
        weights_residual=weights_residual,
        world_ratio=world_ratio[0],
        world_residual=world_residual,
        rank_weights=tuple(rank_weights),
        rank_residual=rank_residual,
        shard_losses=tuple(losses),
        module=name,
        module_class=kind,
        rounded=rounded,
    )


def _rounded(
    own: SingleProcess, averaged: Gradients, mean: Gradients, batch: Any, shards: Sequence[Any], step: int
) -> tuple[str, ...]:
    """The gradients that differ from the global batch's by rounding alone: in float64 the difference is gone.

    A single number, the gradient of a bias say, may lose far more on shards than it happened to lose on the global
    batch. Only where the ranks computed what the shards give by themselves, for the float64 run tells nothing of them.
    """
    if own.double is None or own.state is None:
        return ()
    own.state.restore(own.double)
    whole, _ = _gradients(own, own.double, upcast(batch), step)
    whole = {name: gradient.clone() for name, gradient in whole.items()}
    parts, _ = _gradients_by_shard(own, own.double, [upcast(shard) for shard in shards], step)
    found = []
    for name, want in own.gradients.items():
        allowed = own.tolerance[name] * own.scale[name]
        gap = norm(averaged[name].double() - want.double()) if name in averaged else 0.0
        if not allowed < gap <= _LARGEST_ROUNDING * own.scale[name] or name not in whole:
            continue
        exact = torch.stack([term[name] for of_shard in parts for term in of_shard]).sum(0) / len(shards)
        if norm(averaged[name].double() - mean[name].double()) <= allowed and norm(exact - whole[name]) <= gap / 10:
            found.append(name)
    return tuple(found)


def _gradients_by_shard(
    own: SingleProcess, module: nn.Module, shards: Sequence[Any], step: int
) -> tuple[list[list[Gradients]], list[float]]:
    """The gradients of `module` on each shard by itself, term by term of the loss, and the losses."""
    assert own.state is not None
    parts, losses = [], []
    for shard in shards:
        own.state.restore(module)
        gradients, value = _gradients_by_part(own, module, shard, step)
        parts.append(gradients)
        losses.append(value)
    return parts, losses


def _gradients_by_part(own: SingleProcess, module: nn.Module, shard: Any, step: int) -> tuple[list[Gradients], float]:
    """The gradients of each term of the loss on one shard, with zeros where there is none, and the loss."""
    clear_gradients(module)
    found: list[Gradients] = []
    with _hushed(own, module):
        seed = step_seed(own.seed, step)
        loss = compute_loss(own.recipe, module, shard, step=step, seed=seed, place="shard by shard, ")
        terms = [part for part in loss.parts if part.requires_grad]
        for term in terms if len(terms) <= _MOST_TERMS else [loss.total]:
            clear_gradients(module)
            term.backward(retain_graph=True)
            gradients = gradients_of(named_parameters(module))
            found.append({name: gradients.get(name, torch.zeros_like(own.gradients[name])) for name in own.gradients})
    return found, loss.value


@contextlib.contextmanager
def _hushed(own: SingleProcess, module: nn.Module) -> Iterator[None]:
    if not own.draws:
        yield
        return
    with quiet_modules(module), QuietRandomness():
        yield


def _first_coupled_module(own: SingleProcess, batch: Any, shards: Sequence[Any], step: int) -> tuple[str, str]:
    """The first module whose output for rank 0's samples depends on the others and whose input does not; its class.

    In float64 a coupling shows that is smaller than rounding in the model's own dtype. The model itself has no name.
    """
    eps = max((eps_of(p.dtype) for p in own.module.parameters() if p.is_floating_point()), default=_COUPLED_EXACTLY)
    found = _first_coupled_in(own, own.module, batch, shards[0], step, 1e3 * eps)
    if found is None and own.double is not None:
        whole, part = upcast(batch), upcast(shards[0])
        found = _first_coupled_in(own, own.double, whole, part, step, _COUPLED_EXACTLY)
    return ("", "") if found is None else (found, type(own.module.get_submodule(found)).__name__)


def _first_coupled_in(
    own: SingleProcess, module: nn.Module, batch: Any, shard: Any, step: int, threshold: float
) -> str | None:
    whole = _calls(own, module, batch, step)
    part = _calls(own, module, shard, step)

    def coupled(full: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]) -> bool:
        return any(_depends(f, a, threshold) for f, a in zip(full, alone, strict=False))

    for key, (inputs, outputs) in part.items():
        if key in whole and coupled(whole[key][1], outputs) and not coupled(whole[key][0], inputs):
            return key[0]
    return None


def _calls(
    own: SingleProcess, module: nn.Module, batch: Any, step: int
) -> dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The inputs and outputs of every call of every submodule, in the order in which the calls ended."""
    begun: dict[str, list[list[torch.Tensor]]] = {}
    found: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    counts: dict[str, int] = {}

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            begun.setdefault(name, []).append(
                [t.detach().clone() for t in iter_tensors([args, kwargs]) if not t.is_complex()]
            )

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            counts[name] = counts.get(name, 0) + 1
            made = [t.detach().clone() for t in iter_tensors(output) if t.is_floating_point()]
            found[name, counts[name]] = begun[name].pop(), made

        return hook

    assert own.state is not None
    own.state.restore(module)
    handles = []
    for name, submodule in module.named_modules():
        handles.append(submodule.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(submodule.register_forward_hook(after(name)))
    try:
        with quiet_modules(module), QuietRandomness():
            seed_everything(step_seed(own.seed, step))
            own.recipe.loss(module, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _depends(whole: torch.Tensor, part: torch.Tensor, threshold: float) -> bool:
    """Whether the rows of `part` (rank 0's) are other numbers in `whole`."""
    if whole.dim() != part.dim() or whole.dim() == 0:
        return False
    axes = [axis for axis in range(whole.dim()) if whole.shape[axis] != part.shape[axis]]
    if len(axes) != 1 or whole.shape[axes[0]] < part.shape[axes[0]]:
        return False
    rows = whole.narrow(axes[0], 0, part.shape[axes[0]])
    scale = float(torch.linalg.vector_norm(rows.double()))
    gap = float(torch.linalg.vector_norm(rows.double() - part.double()))
    return gap > threshold * scale if scale else gap > 0.0
