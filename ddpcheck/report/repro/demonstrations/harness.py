"""A recipe on a rank, nests of tensors, comparing between ranks, and printing."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.ddp.sync_batchnorm import (
    synchronised_on_cpu as synchronised_on_cpu,
)
from ddpcheck.gather.state.randomness import QuietRandomness, quiet_modules
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.report.repro.demonstrations.settings import (
    BATCH_SEEDS,
    DEVICE,
    MODEL_SEED,
    RANK,
    STEP_SEEDS,
    STEPS,
    TIMEOUT,
    WORLD_SIZE,
)


def seed_all(seed: int) -> None:
    """Seed every global generator that is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def built(recipe: Any) -> Any:
    """The bare model."""
    seed_all(MODEL_SEED)
    return recipe.model().to(DEVICE)


def wrapped(recipe: Any, net: Any) -> tuple[Any, Any]:
    """The model in DDP, or in the recipe's own wrapper, and its optimizer."""
    if recipe.wrap is None:
        ddp = DistributedDataParallel(net, **recipe.ddp_kwargs)
    else:
        ddp = recipe.wrap(net, DEVICE)
    return ddp, optimizer_for(recipe, ddp)


def optimizer_for(recipe: Any, module: nn.Module) -> Any:
    """The recipe's optimizer; SGD where it has none."""
    trained = (p for p in module.parameters() if p.requires_grad)
    if recipe.optimizer is None:
        return torch.optim.SGD(trained, lr=0.01)
    return recipe.optimizer(trained)


def global_batch(recipe: Any, step: int) -> Any:
    """The whole batch of a step."""
    seed_all(BATCH_SEEDS[step])
    return recipe.batch(step)


def local_batch(recipe: Any, step: int) -> Any:
    """The batch of this rank: its part of the global batch."""
    seed_all(BATCH_SEEDS[step])
    return recipe.shard(recipe.batch(step), RANK, WORLD_SIZE)


def local_loss(recipe: Any, module: nn.Module, step: int) -> Any:
    """The loss of this rank in a step."""
    data = local_batch(recipe, step)
    seed_all(STEP_SEEDS[step][RANK])
    return recipe.loss(module, data)


def training_steps(recipe: Any, ddp: Any, optim: Any) -> Iterator[int]:
    """Train; the caller's turn comes after backward, before the optimizer's step."""
    for step in range(STEPS):
        optim.zero_grad()
        local_loss(recipe, ddp, step).backward()
        yield step
        optim.step()


# What a recipe's functions become, where they need more


def tensor_shard(data: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of dim 0."""
    return data.tensor_split(world_size)[rank]


def flat_shard(data: Any, rank: int, world_size: int) -> Any:
    """A rank's part of dim 0 of every tensor in a dict or tuple."""
    if isinstance(data, dict):
        return {name: x.tensor_split(world_size)[rank] for name, x in data.items()}
    return tuple(x.tensor_split(world_size)[rank] for x in data)


def nest_shard(data: Any, rank: int, world_size: int) -> Any:
    """A rank's part of dim 0 of every tensor in `data`, and of lists of words."""
    size = next(len(x) for x in leaves(data) if getattr(x, "ndim", 0))
    parts = torch.arange(size).tensor_split(world_size)
    first = sum(len(part) for part in parts[:rank])
    last = first + len(parts[rank])

    def cut(leaf: Any) -> Any:
        words = isinstance(leaf, (list, tuple)) and len(leaf) == size
        splits = words or bool(getattr(leaf, "ndim", 0))
        return leaf[first:last] if splits else leaf

    return mapped(cut, data)


def in_training_mode(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """`model`, and then `train()`, as a training loop calls it."""

    def build() -> nn.Module:
        net = model()
        into_training(net)
        return net

    return build


def summed(loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """`loss`, and then the sum of all losses in what it returns."""

    def total(module: nn.Module, data: Any) -> Any:
        losses = [x for x in leaves(loss(module, data)) if isinstance(x, torch.Tensor)]
        return sum(x.sum() for x in losses if x.requires_grad)

    return total


def on_device(loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """`loss`, its batch moved to this rank's device."""

    def moved(leaf: Any) -> Any:
        return leaf.to(DEVICE) if isinstance(leaf, torch.Tensor) else leaf

    return lambda module, data: loss(module, mapped(moved, data))


@contextlib.contextmanager
def without_randomness(module: nn.Module) -> Iterator[None]:
    """Random numbers become constants: ranks and one process cannot draw the same."""
    with QuietRandomness(), quiet_modules(module):
        yield


# Nests of dicts, lists, tuples and dataclasses


def leaves(nest: Any) -> list[Any]:
    """The values in a nest."""
    found: list[Any] = []
    mapped(found.append, nest)
    return found


def mapped(function: Any, nest: Any) -> Any:
    """A copy of a nest with `function` of each value; a list of words is one value."""
    if isinstance(nest, Mapping):
        items = {key: mapped(function, value) for key, value in nest.items()}
        return items if type(nest) is dict else type(nest)(items)  # type: ignore[call-arg]
    if isinstance(nest, (list, tuple)) and not is_words(nest):
        values = [mapped(function, value) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest)]
        changed = {name: mapped(function, getattr(nest, name)) for name in names}
        return dataclasses.replace(nest, **changed)
    return function(nest)


def is_words(value: Any) -> bool:
    """A list holds nothing but words."""
    return bool(value) and all(isinstance(x, str) for x in value)


# Parameters and gradients


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, as the bare module calls them."""
    named = module.named_parameters()
    return {n.removeprefix("_orig_mod.").removeprefix("module."): p for n, p in named}


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that are there, by name."""
    named = parameters_of(module).items()
    return {name: p.grad.detach().to_dense() for name, p in named if p.grad is not None}


def without_gradient(module: nn.Module) -> list[str]:
    """The names of trainable parameters whose gradient is None."""
    named = parameters_of(module).items()
    return [name for name, p in named if p.requires_grad and p.grad is None]


def moving(module: nn.Module) -> set[str]:
    """The names of parameters whose gradient is not zero."""
    return {name for name, gradient in gradients_of(module).items() if gradient.any()}


# Between ranks


def side_group() -> Any:
    """A group for comparing, so that DDP has its own to itself."""
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")


def gathered(value: Any, group: Any = None) -> list[Any]:
    """`value` of every rank."""
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def differences(facts: dict[str, Any], group: Any = None) -> dict[str, list[Any]]:
    """Facts that are not the same on every rank, and the value on each rank."""
    names = [name for names in gathered(list(facts), group) for name in names]
    found = {}
    for name in dict.fromkeys(names):
        everyone = gathered(facts.get(name, "nothing"), group)
        if not all(same(everyone[0], other) for other in everyone):
            found[name] = everyone
    return found


def same(one: Any, other: Any) -> bool:
    """Two values are equal; tensors bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# What a rank says


def say(text: str) -> None:
    """Print a line of this rank."""
    print(f"rank {RANK}: {text}", flush=True)


def tell(found: dict[str, list[Any]], what: str) -> int:
    """Say what this rank has where the ranks differ; returns 1 where they do."""
    if not found:
        say(f"{what}: the same on every rank")
        return 0
    name, everyone = next(iter(found.items()))
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    own = everyone[RANK]
    if isinstance(own, torch.Tensor):
        own = f"norm {own.double().norm().item():.6g}"
    say(f"{what}: {name.removeprefix('module.')}: {own}{more}")
    return 1


def in_short(error: Exception) -> str:
    """An error in a line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160)


def listed(names: Any) -> str:
    """Names in a sentence, not too many of them."""
    names = list(names)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or "none") + more


def leave(verdict: int) -> None:
    """End this rank."""
    if verdict:
        time.sleep(1)  # torchrun ends all ranks when one fails: let each say its line
    elif dist.is_initialized():
        dist.destroy_process_group()  # else threads of its may abort the exit
    sys.exit(verdict)
