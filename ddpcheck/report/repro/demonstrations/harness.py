"""A recipe on a rank: settings, training, comparing between ranks, and printing."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.state.randomness import QuietRandomness, SampleRandomness, quiet_modules
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.training_step import batch_seed, fingerprints_of_rows, model_seed, step_seed
from ddpcheck.recipe.pytree import to_device, tree_leaves, tree_map, tree_tensors, upcast

# A script has settings of its own in the place of these.
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cpu")
BACKEND = "gloo"
SEED = 0
STEPS = 1
SUBJECTS: list[str] = []
TOLERANCE = 0.0
TIMEOUT = 30


def join() -> None:
    """Join the process group."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))


def leave(verdict: int) -> None:
    """End this rank."""
    if verdict:
        time.sleep(1)  # torchrun ends all ranks when one fails: let each say its line
    elif dist.is_initialized():
        dist.destroy_process_group()  # else threads of its may abort the exit
    sys.exit(verdict)


def seed_all(seed: int) -> None:
    """Seed every global generator that is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def made(recipe: Any) -> Any:
    """The recipe that a target is or makes, with what DDP needs on a GPU."""
    recipe = recipe() if callable(recipe) else recipe
    if DEVICE.type != "cpu":
        recipe.ddp_kwargs = {"device_ids": [DEVICE.index], **recipe.ddp_kwargs}
    return recipe


def built(recipe: Any) -> Any:
    """The bare model, in training mode as in a training loop."""
    seed_all(model_seed(SEED))
    net = recipe.model().to(DEVICE)
    into_training(net)
    return net


def wrapped(recipe: Any, net: Any) -> tuple[Any, Any]:
    """The model in DDP, or in the recipe's own wrapper, and its optimizer."""
    if recipe.wrap is None:
        ddp = DistributedDataParallel(net, **recipe.ddp_kwargs)
    else:
        ddp = recipe.wrap(net, DEVICE)
    return ddp, optimizer_for(recipe, ddp)


def optimizer_for(recipe: Any, module: torch.nn.Module) -> Any:
    """The recipe's optimizer; SGD where it has none."""
    trained = (p for p in module.parameters() if p.requires_grad)
    if recipe.optimizer is None:
        return torch.optim.SGD(trained, lr=0.01)
    return recipe.optimizer(trained)


def global_batch(recipe: Any, step: int) -> Any:
    """The whole batch of a step."""
    seed_all(batch_seed(SEED, step))
    return recipe.batch(step)


def local_batch(recipe: Any, step: int) -> Any:
    """The batch of this rank: its part of the global batch."""
    return (recipe.shard or equal_shard)(global_batch(recipe, step), RANK, WORLD_SIZE)


def equal_shard(data: Any, rank: int, world_size: int) -> Any:
    """A rank's part of dim 0 of every tensor in `data`, and of lists of words."""
    size = next(len(x) for x in tree_leaves(data) if getattr(x, "ndim", 0))
    parts = torch.arange(size).tensor_split(world_size)
    first = sum(len(part) for part in parts[:rank])
    last = first + len(parts[rank])

    def cut(leaf: Any) -> Any:
        words = are_words(leaf) and len(leaf) == size
        return leaf[first:last] if words or getattr(leaf, "ndim", False) else leaf

    return tree_map(cut, data, is_leaf=are_words)


def are_words(value: Any) -> bool:
    """A list holds nothing but words."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, str) for x in value)


def loss_of(recipe: Any, module: torch.nn.Module, data: Any) -> Any:
    """The sum of all losses that the recipe has for a batch."""
    return sum(x.sum() for x in tree_tensors(recipe.loss(module, to_device(data, DEVICE))))


def local_loss(recipe: Any, module: torch.nn.Module, step: int) -> Any:
    """The loss of this rank in a step."""
    data = local_batch(recipe, step)
    seed_all(step_seed(SEED, step, RANK))
    return loss_of(recipe, module, data)


def training_steps(recipe: Any, ddp: Any, optim: Any) -> Iterator[int]:
    """Train; the caller's turn comes after backward, before the optimizer's step."""
    for step in range(STEPS):
        optim.zero_grad()
        local_loss(recipe, ddp, step).backward()
        yield step
        optim.step()


@contextlib.contextmanager
def without_randomness(module: torch.nn.Module, data: Any) -> Iterator[None]:
    """Random numbers become constants: ranks and one process cannot draw the same."""
    with quiet_modules(module), QuietRandomness():
        yield


@contextlib.contextmanager
def randomness_by_sample(module: torch.nn.Module, data: Any) -> Iterator[None]:
    """A sample has the same random numbers on its rank and in one process."""
    samples = fingerprints_of_rows([x for x in tree_tensors(upcast(data)) if x.dim()])
    with quiet_modules(module), SampleRandomness(samples):
        yield


# Parameters and gradients


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, as the bare module calls them."""
    return {n.removeprefix("_orig_mod.").removeprefix("module."): p for n, p in module.named_parameters()}


def named_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that are there, by name."""
    named = parameters_of(module).items()
    return {name: p.grad.detach().to_dense() for name, p in named if p.grad is not None}


def without_gradient(module: torch.nn.Module) -> list[str]:
    """The names of trainable parameters whose gradient is None."""
    return [name for name, p in parameters_of(module).items() if p.requires_grad and p.grad is None]


def moving(module: torch.nn.Module) -> set[str]:
    """The names of parameters whose gradient is not zero."""
    return {name for name, gradient in named_gradients(module).items() if gradient.any()}


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
    """Facts that are not the same on every rank, and the value on each rank; tensors are compared bit by bit."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)

    found = {}
    for name in dict.fromkeys(name for names in gathered(list(facts), group) for name in names):
        own = facts.get(name, "nothing")
        everyone = gathered(own.detach().cpu() if isinstance(own, torch.Tensor) else own, group)
        if not all(same(everyone[0], other) for other in everyone):
            found[name] = everyone
    return found


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
