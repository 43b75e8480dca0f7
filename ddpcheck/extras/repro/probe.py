"""Probe a target on a rank: recipe parts, imports and random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import torch

from ddpcheck.findings.source_lines import file_of_module
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state.randomness import drawn_since, generator_states, seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.recipe.pytree import to_device, tree_tensors
from ddpcheck.recipe.target import find_file, is_path, load_on_rank, split_target
from ddpcheck.worlds import rank as this_rank


@dataclasses.dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts about a target, for generating a script."""

    file: str
    module: str  # module name
    package: str  # package of the module; "" for a file
    attribute: str  # attribute of the module; "" if the module is the recipe
    parts: tuple[str, ...]  # names of the attributes set in the recipe
    uses_random_numbers: bool  # True if the forward pass uses torch generators, so that random numbers must be replaced
    loaded: tuple[tuple[str, str], ...]  # (name, file) of each module imported by the target


def inspect_target(target: str, seed: int, train: bool) -> TargetInfo:
    """Return facts about `target`; if `train`, run a step first, which may import modules."""
    before, device = set(sys.modules), torch.device(this_rank.current().device)
    recipe, uses_random_numbers = load_on_rank(target), True
    with synchronised_on_cpu(), contextlib.suppress(Exception, SystemExit):
        seed_everything(seed)
        net = recipe.build_model().to(device)
        into_training(net)
        batch, states = to_device(recipe.global_batch(0), device), generator_states(device)
        if train:
            parts = [part.sum() for part in tree_tensors(recipe.loss(net, batch)) if part.requires_grad]
            uses_random_numbers = "torch" in drawn_since(states, device)
            torch.autograd.backward(parts)
            recipe.build_optimizer(p for p in net.parameters() if p.requires_grad).step()
    source, attribute = split_target(target)
    loaded = {name: file_of_module(module) for name, module in [*sys.modules.items()]}
    file = str(find_file(source)) if is_path(source) else loaded[source]
    name = [name for name in loaded if loaded[name] == file][-1] if is_path(source) else source
    parts_there = tuple(part.name for part in dataclasses.fields(recipe) if getattr(recipe, part.name))
    new = tuple((name, path) for name, path in loaded.items() if name not in before and path.endswith(".py"))
    return TargetInfo(file, name, sys.modules[name].__package__ or "", attribute, parts_there, uses_random_numbers, new)
