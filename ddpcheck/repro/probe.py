"""A look at a target on a rank: which functions it has, what its batches are, what it imports and draws."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch

from ddpcheck import rank as this_rank
from ddpcheck.gather.randomness import drawn_since, generator_states, seed_everything
from ddpcheck.gather.syncbn import synchronised_on_cpu
from ddpcheck.nests import iter_tensors, to_device
from ddpcheck.recipe import Recipe
from ddpcheck.reference import batch_seed, model_seed, step_seed
from ddpcheck.target import find_file, is_path, load_on_rank, split_target


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a target.

    Attributes:
        file: Where it is.
        package: That its module is in; empty for a file.
        attribute: Of the module; empty where the module is the recipe.
        is_function: Whether the attribute has to be called.
        given: The optional functions that the recipe has.
        ddp_kwargs: Whether it has any.
        batch: "tensor", "dict" or "tuple" of tensors, or "nest".
        loss: "scalar", "dict" or "list" of scalars that all require grad, or "nest".
        drawn: The libraries from whose generators the model, its batches or its loss draw.
        draws: Whether batches, loss, backward pass or optimizer do.
        forward_draws: Whether the forward pass draws from torch's, so that no two runs share the numbers.
        loaded: Name and file of every module that was imported on the way.
        model_seed: Under which the report built the model.
        batch_seeds: By step.
        step_seeds: By step and rank.
    """

    file: str
    package: str
    attribute: str
    is_function: bool
    given: tuple[str, ...]
    ddp_kwargs: bool
    batch: str
    loss: str
    drawn: tuple[str, ...]
    draws: bool
    forward_draws: bool
    loaded: tuple[tuple[str, str], ...]
    model_seed: int
    batch_seeds: tuple[int, ...]
    step_seeds: tuple[tuple[int, ...], ...]


def look(target: str, seed: int, world_size: int, steps: int, run_loss: bool) -> Look:
    """Load `target`, make its first batch, and where `run_loss` also take the model through one step."""
    before = set(sys.modules)
    device = torch.device(this_rank.current().device)
    with synchronised_on_cpu():
        recipe = load_on_rank(target)
        place, attribute = split_target(target)
        states = _seeded(batch_seed(seed, 0), device)
        batch = recipe.global_batch(0)
        drawn = drawn_since(states, device)
        kind, forward, by_model = "nest", True, frozenset[str]()
        if run_loss:
            states = _seeded(model_seed(seed), device)
            net = recipe.build_model().to(device)
            by_model = drawn_since(states, device)
            states = _seeded(step_seed(seed, 0), device)
            loss = recipe.loss(net, to_device(batch, device))
            kind = _kind_of_loss(loss)
            forward = "torch" in drawn_since(states, device)
            terms = [part for part in iter_tensors(loss) if part.requires_grad]
            torch.autograd.backward([part.sum() for part in terms])
            recipe.build_optimizer(p for p in net.parameters() if p.requires_grad).step()
            drawn |= drawn_since(states, device)  # hooks and optimizers may draw as well
        else:
            drawn |= {"torch"}  # not known
    file, module = _module_of(place)
    value: Any = module
    for part in filter(None, attribute.split(".")):
        value = getattr(value, part)
    return Look(
        file=file,
        package=(module.__package__ or "") if not is_path(place) else "",
        attribute=attribute,
        is_function=bool(attribute) and not isinstance(value, Recipe),
        given=tuple(name for name in ("shard", "optimizer", "wrap") if getattr(recipe, name) is not None),
        ddp_kwargs=bool(recipe.ddp_kwargs),
        batch=_kind_of(batch),
        loss=kind,
        drawn=tuple(sorted(drawn | by_model)),
        draws=bool(drawn),
        forward_draws=forward,
        loaded=tuple(
            (name, os.path.abspath(loaded))
            for name, item in list(sys.modules.items())
            if name not in before and (loaded := getattr(item, "__file__", None)) and loaded.endswith(".py")
        ),
        model_seed=model_seed(seed),
        batch_seeds=tuple(batch_seed(seed, step) for step in range(steps)),
        step_seeds=tuple(tuple(step_seed(seed, step, rank) for rank in range(world_size)) for step in range(steps)),
    )


def _seeded(seed: int, device: torch.device) -> dict[tuple[str, int], Any]:
    seed_everything(seed)
    return generator_states(device)


def _module_of(place: str) -> tuple[str, Any]:
    """The file that a target names, and its module."""
    if not is_path(place):
        module = sys.modules[place]
        return str(module.__file__), module
    path = str(find_file(place))
    loaded = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path]
    return path, loaded[-1]


def _kind_of_loss(loss: Any) -> str:
    def adds_up(values: Any) -> bool:
        return all(isinstance(x, torch.Tensor) and x.ndim == 0 and x.requires_grad for x in values)

    if isinstance(loss, torch.Tensor):
        return "scalar" if loss.ndim == 0 else "nest"
    if type(loss) is dict and adds_up(loss.values()):
        return "dict"
    return "list" if type(loss) in (list, tuple) and adds_up(loss) else "nest"


def _kind_of(batch: Any) -> str:
    def splits(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0

    if splits(batch):
        return "tensor"
    if type(batch) is dict and all(map(splits, batch.values())):
        return "dict"
    if type(batch) is tuple and all(map(splits, batch)):
        return "tuple"
    return "nest"
