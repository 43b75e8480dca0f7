"""What several demonstrations need: data, the loss, comparing between ranks."""

from __future__ import annotations

import dataclasses
import os
import random
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.gather.randomness import QuietRandomness, quiet_modules
from ddpcheck.repro.stand_in import BATCH_SEEDS, MODEL_SEED, STEP_SEEDS, STEPS, target

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count())


def seed_all(seed: int) -> None:
    """Seed every generator that the code above draws from."""
    torch.manual_seed(seed)
    random.seed(seed)  # only: random
    numpy.random.seed(seed)  # only: numpy


def local_data(step: int) -> Any:
    """What this rank trains on: its part of the global batch."""
    seed_all(BATCH_SEEDS[step])  # only: draws
    whole = target.batch(step)
    return target.part(whole)


def global_data(step: int) -> Any:
    """The whole batch of a step."""
    seed_all(BATCH_SEEDS[step])  # only: draws
    return target.whole(step)


def part_of_dict(data: dict[str, Any]) -> dict[str, Any]:
    """Rank's part of dim 0 of every tensor."""
    return {name: x.tensor_split(WORLD_SIZE)[RANK] for name, x in data.items()}


def part_of_tuple(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rank's part of dim 0 of every tensor."""
    return tuple(x.tensor_split(WORLD_SIZE)[RANK] for x in data)


def part_of_nest(data: Any) -> Any:
    """Rank's part of dim 0 of every tensor in `data`; whatever else is in it stays."""
    sizes = [x.shape[0] for x in leaves(data) if hasattr(x, "ndim") and x.ndim]
    size = int(sizes[0])
    share, rest = divmod(size, WORLD_SIZE)
    first = RANK * share + min(RANK, rest)
    last = first + share + (rest > RANK)

    def cut(leaf: Any) -> Any:
        words = isinstance(leaf, (list, tuple)) and len(leaf) == size
        rows = hasattr(leaf, "ndim") and leaf.ndim
        return leaf[first:last] if words or rows else leaf

    return mapped(cut, data)


def to_device(data: Any) -> Any:
    """`data` with its tensors on this rank's device."""
    return mapped(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, data)


def leaves(nest: Any) -> list[Any]:
    """The values in a nest of dicts, lists, tuples and dataclasses."""
    found: list[Any] = []
    mapped(found.append, nest)
    return found


def is_words(value: Any) -> bool:
    """Whether a list holds nothing but words."""
    return bool(value) and all(isinstance(x, str) for x in value)


def mapped(function: Any, nest: Any) -> Any:
    """A copy of a nest of containers with `function` of each value."""
    if isinstance(nest, Mapping):
        items = {key: mapped(function, value) for key, value in nest.items()}
        return items if type(nest) is dict else type(nest)(items)  # type: ignore[call-arg]
    if isinstance(nest, (list, tuple)) and not is_words(nest):
        values = [mapped(function, value) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        changed = {
            f.name: mapped(function, getattr(nest, f.name))
            for f in dataclasses.fields(nest)
        }
        return dataclasses.replace(nest, **changed)
    return function(nest)


def total(losses: Any) -> Any:
    """The sum of the losses in a nest of them, as far as they can be differentiated."""
    return sum(
        x.sum()
        for x in leaves(losses)
        if isinstance(x, torch.Tensor) and x.requires_grad
    )


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, as the bare module calls them."""
    named = module.named_parameters()
    return {n.removeprefix("_orig_mod.").removeprefix("module."): p for n, p in named}


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that are there, by name."""
    named = parameters_of(module).items()
    return {name: p.grad.detach().to_dense() for name, p in named if p.grad is not None}


def in_short(error: Exception) -> str:
    """An error in a line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160)


def listed(names: Any) -> str:
    """Names in a sentence, not too many of them."""
    names = list(names)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or "none") + more


def gathered(value: Any, group: Any) -> list[Any]:
    """`value` of every rank."""
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def differences(facts: dict[str, Any], group: Any) -> dict[str, list[Any]]:
    """What is not the same on every rank, and what each rank has there."""
    names = [name for names in gathered(list(facts), group) for name in names]
    found = {}
    for name in dict.fromkeys(names):
        everyone = gathered(facts.get(name, "nothing"), group)
        if not all(same(everyone[0], other) for other in everyone):
            found[name] = everyone
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; tensors bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def in_words(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, torch.Tensor):
        return f"norm {value.double().norm().item():.6g}"
    return str(value)


def tell(found: dict[str, list[Any]], what: str) -> int:
    """Print what this rank has where the ranks differ."""
    if not found:
        print(f"rank {RANK}: {what}: the same on every rank", flush=True)
        return 0
    name, everyone = next(iter(found.items()))
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    name, own = name.removeprefix("module."), in_words(everyone[RANK])
    print(f"rank {RANK}: {what}: {name}: {own}{more}", flush=True)
    return 1


def backward(module: nn.Module, data: Any) -> None:
    """Loss and gradients."""
    total(target.loss(module, data)).backward()


def quiet_backward(module: nn.Module, data: Any) -> None:
    """Loss and gradients, with random numbers silenced.

    Ranks and a single process cannot draw the same dropout masks.
    """
    with QuietRandomness(), quiet_modules(module):
        total(target.loss(module, data)).backward()


def single_process() -> dict[str, torch.Tensor]:
    """The gradients that one process has on the whole batch, without DDP."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # only: alone
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # only: alone
    seed_all(MODEL_SEED)
    net = target.model()
    optim = target.sgd(net)
    for step in range(STEPS):
        optim.zero_grad()
        seed_all(STEP_SEEDS[step][0])  # only: draws
        backward(net, global_data(step))
        if step + 1 < STEPS:
            optim.step()
    dist.destroy_process_group()  # only: alone
    return gradients_of(net)
