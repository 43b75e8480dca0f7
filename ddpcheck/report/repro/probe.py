"""A look at a target on a rank: which functions it has, what it imports and draws."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch

from ddpcheck.findings.source_lines import file_of_module
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state.randomness import drawn_since, generator_states, seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps.training_step import batch_seed, model_seed, step_seed
from ddpcheck.recipe.pytree import to_device, tree_tensors
from ddpcheck.recipe.target import find_file, is_path, load_on_rank, split_target
from ddpcheck.worlds import rank as this_rank


@dataclasses.dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts of a target that a script is made from."""

    file: str  # where it is
    module: str  # the name of its module
    package: str  # that its module is in; empty for a file
    attribute: str  # of the module; empty where the module is the recipe
    given: tuple[str, ...]  # what the recipe has, by the names of its attributes
    forward_draws: bool  # whether the forward pass draws from torch's generators, so that no two runs share the numbers
    loaded: tuple[tuple[str, str], ...]  # name and file of every module that was imported on the way


def look(target: str, seed: int, run: str) -> TargetInfo:
    """Load `target`, and run its "loss", or its "model" alone, or nothing."""
    before = set(sys.modules)
    device = torch.device(this_rank.current().device)
    with synchronised_on_cpu():
        recipe = load_on_rank(target)
        draws = True
        if run:
            seed_everything(model_seed(seed))
            net = recipe.build_model().to(device)
            into_training(net)
        if run == "loss":
            seed_everything(batch_seed(seed, 0))
            batch = recipe.global_batch(0)
            seed_everything(step_seed(seed, 0))
            states = generator_states(device)
            loss = recipe.loss(net, to_device(batch, device))
            draws = "torch" in drawn_since(states, device)
            torch.autograd.backward([part.sum() for part in tree_tensors(loss) if part.requires_grad])
            recipe.build_optimizer(p for p in net.parameters() if p.requires_grad).step()
    place, attribute = split_target(target)
    file, module = _module_of(place)
    return TargetInfo(
        file=file,
        module=module.__name__,
        package=module.__package__ or "",
        attribute=attribute,
        given=tuple(item.name for item in dataclasses.fields(recipe) if getattr(recipe, item.name)),
        forward_draws=draws,
        loaded=tuple(
            (name, os.path.abspath(loaded))
            for name, item in list(sys.modules.items())
            if name not in before and (loaded := file_of_module(item)).endswith(".py")
        ),
    )


def _module_of(place: str) -> tuple[str, Any]:
    """The file that a target names, and its module."""
    if not is_path(place):
        module = sys.modules[place]
        return str(module.__file__), module
    path = str(find_file(place))
    loaded = [m for m in list(sys.modules.values()) if file_of_module(m) == path]
    return path, loaded[-1]
