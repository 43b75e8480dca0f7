"""A plain training loop on one rank: what someone runs who does not have ddpcheck, with or without another tool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state.randomness import seed_everything
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.recipe.target import load_target


def plain(_loss: Tensor, _model: nn.Module) -> None:
    """Nothing but DDP."""


def debug(_loss: Tensor, _model: nn.Module) -> None:
    """DDP with `TORCH_DISTRIBUTED_DEBUG`: INFO from the beginning, and DETAIL from after the first wrapper on.

    DETAIL from the beginning would be DETAIL's own best, but with gloo it kills every process in the constructor.
    """
    dist.set_debug_level(dist.DebugLevel.DETAIL)


def mmengine(loss: Tensor, model: nn.Module) -> None:
    """What mmengine's wrapper does with `detect_anomalous_params=True`: called between forward and backward."""
    from mmengine.model.utils import detect_anomalous_params

    detect_anomalous_params(loss, model)


TOOLS: dict[str, Callable[[Tensor, nn.Module], None]] = {"plain": plain, "debug": debug, "mmengine": mmengine}


def train(target: str, steps: int, tool: str) -> None:
    """Train for `steps` steps as a script under a launcher would; the tool speaks through exceptions and output."""
    if tool == "debug":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        dist.set_debug_level_from_env()
    look = TOOLS[tool]
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    recipe = load_target(target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(synchronised_on_cpu())
        seed_everything(0)
        module = recipe.model()
        model = recipe.wrap(module, device) if recipe.wrap else DistributedDataParallel(module, **recipe.ddp_kwargs)
        optimizer = recipe.build_optimizer(model.parameters())
        for step in range(steps):
            seed_everything(step)
            batch = recipe.local_batch(recipe.batch(step), rank, world_size)
            seed_everything(1000 * step + rank)
            optimizer.zero_grad()
            loss = torch.stack([part.sum() for part in tree_tensors(recipe.loss(model, batch))]).sum()
            look(loss, model)
            loss.backward()
            optimizer.step()
