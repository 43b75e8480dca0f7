"""A look at a target on a rank: which functions it has, what its batches and losses are, what it imports and draws."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state.randomness import drawn_since, generator_states, seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.training_step import batch_seed, model_seed, step_seed
from ddpcheck.recipe.pytree import to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.recipe.target import find_file, is_path, load_on_rank, split_target
from ddpcheck.worlds import rank as this_rank


@dataclasses.dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts of a target that a script is made from.

    Attributes:
        file: Where it is.
        package: That its module is in; empty for a file.
        attribute: Of the module; empty where the module is the recipe.
        is_function: Whether the attribute has to be called.
        given: What the recipe has, by the names of its attributes.
        batch: "tensor", "flat" for a dict or tuple of tensors, or "nest".
        loss_is_scalar: Whether the loss is one scalar.
        needs_train: Whether `train()` changes the mode of a part of the model, or is one of the user's own.
        forward_draws: Whether the forward pass draws from torch's generators, so that no two runs share the numbers.
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
    batch: str
    loss_is_scalar: bool
    needs_train: bool
    forward_draws: bool
    loaded: tuple[tuple[str, str], ...]
    model_seed: int
    batch_seeds: tuple[int, ...]
    step_seeds: tuple[tuple[int, ...], ...]


def look(target: str, seed: int, world_size: int, steps: int, run: str) -> TargetInfo:
    """Load `target` and make its first batch.

    Args:
        target: The TARGET.
        seed: Of the report.
        world_size: For how many ranks the seeds are.
        steps: For how many steps.
        run: What of it is run besides: its "loss", or its "model" alone, or nothing.
    """
    before = set(sys.modules)
    device = torch.device(this_rank.current().device)
    with synchronised_on_cpu():
        recipe = load_on_rank(target)
        place, attribute = split_target(target)
        seed_everything(batch_seed(seed, 0))
        batch = recipe.global_batch(0)
        scalar, draws, train = False, True, False
        if run:
            seed_everything(model_seed(seed))
            net = recipe.build_model().to(device)
            train = _needs_train(net)
            into_training(net)
        if run == "loss":
            seed_everything(step_seed(seed, 0))
            states = generator_states(device)
            loss = recipe.loss(net, to_device(batch, device))
            scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0
            draws = "torch" in drawn_since(states, device)
            torch.autograd.backward([part.sum() for part in tree_tensors(loss) if part.requires_grad])
            recipe.build_optimizer(p for p in net.parameters() if p.requires_grad).step()
    file, module = _module_of(place)
    value: Any = module
    for part in filter(None, attribute.split(".")):
        value = getattr(value, part)
    return TargetInfo(
        file=file,
        package=(module.__package__ or "") if not is_path(place) else "",
        attribute=attribute,
        is_function=bool(attribute) and not isinstance(value, Recipe),
        given=tuple(item.name for item in dataclasses.fields(recipe) if getattr(recipe, item.name)),
        batch=_kind_of(batch),
        loss_is_scalar=scalar,
        needs_train=train,
        forward_draws=draws,
        loaded=tuple(
            (name, os.path.abspath(loaded))
            for name, item in list(sys.modules.items())
            if name not in before and (loaded := getattr(item, "__file__", None)) and loaded.endswith(".py")
        ),
        model_seed=model_seed(seed),
        batch_seeds=tuple(batch_seed(seed, step) for step in range(steps)),
        step_seeds=tuple(tuple(step_seed(seed, step, rank) for rank in range(world_size)) for step in range(steps)),
    )


def _kind_of(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return "tensor"
    values = batch.values() if type(batch) is dict else batch if type(batch) is tuple else [None]
    return "flat" if all(isinstance(x, torch.Tensor) and x.ndim for x in values) else "nest"


def _needs_train(net: nn.Module) -> bool:
    return not net.training or any(type(part).train is not nn.Module.train for part in net.modules())


def _module_of(place: str) -> tuple[str, Any]:
    """The file that a target names, and its module."""
    if not is_path(place):
        module = sys.modules[place]
        return str(module.__file__), module
    path = str(find_file(place))
    loaded = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path]
    return path, loaded[-1]
