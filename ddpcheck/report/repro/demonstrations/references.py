"""Gradients against those of one process, of the ranks, and of a second run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.report.repro.demonstrations.harness import (
    built,
    gathered,
    global_batch,
    gradients_of,
    in_short,
    local_batch,
    local_loss,
    optimizer_for,
    say,
    seed_all,
    side_group,
    wrapped,
)
from ddpcheck.report.repro.demonstrations.settings import (
    RANK,
    STEP_SEEDS,
    STEPS,
    TOLERANCE,
    WORLD_SIZE,
)


def last_gradients(
    recipe: Any,
    module: nn.Module,
    batch: Callable[[Any, int], Any],
    rank: int,
    quiet: Callable[[nn.Module], Any],
) -> dict[str, torch.Tensor]:
    """Train, and return the gradients of the last step."""
    optim = optimizer_for(recipe, module)
    for step in range(STEPS):
        optim.zero_grad()
        data = batch(recipe, step)
        seed_all(STEP_SEEDS[step][rank])
        with quiet(module):
            recipe.loss(module, data).backward()
        if step + 1 < STEPS:
            optim.step()
    return gradients_of(module)


def single_process(
    recipe: Any,
    quiet: Callable[[nn.Module], Any] = contextlib.nullcontext,
    in_group: bool = False,
) -> dict[str, torch.Tensor]:
    """The gradients that one process has on the whole batch, without DDP.

    Where `in_group`, in a process group of its own, which the model needs.
    """
    if in_group:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = last_gradients(recipe, built(recipe), global_batch, 0, quiet)
    if in_group:
        dist.destroy_process_group()
    return alone


def sizes_of(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """The size to which the error of each gradient is relative.

    Its norm, or what it would be if its elements were as large as those of the others
    in its module: a gradient that is zero but for rounding has no size of its own.
    """
    everything = torch.cat([x.double().flatten() for x in gradients.values()])
    rms = {
        name: float(x.double().norm()) / x.numel() ** 0.5
        for name, x in gradients.items()
        if x.numel()
    }
    floor = 2e-6 * float(everything.norm()) / everything.numel() ** 0.5
    modules: dict[str, float] = {}
    for name, size in rms.items():
        module = name.rpartition(".")[0]
        modules[module] = max(size, modules.get(module, floor))
    return {
        name: modules[name.rpartition(".")[0]] * gradients[name].numel() ** 0.5
        for name in rms
    }


def global_gradient(
    recipe: Any,
    alone: dict[str, torch.Tensor],
    quiet: Callable[[nn.Module], Any] = contextlib.nullcontext,
) -> int:
    """Compare DDP on shards with one process on the whole batch."""
    ddp, _ = wrapped(recipe, built(recipe))
    together = last_gradients(recipe, ddp, local_batch, RANK, quiet)
    got = {name: together.get(name, 0 * want) for name, want in alone.items()}
    errors = {
        name: float((got[name] - alone[name]).double().norm()) / max(size, 1e-30)
        for name, size in sizes_of(alone).items()
    }
    worst = max(errors, key=lambda name: errors[name])
    whole = torch.cat([x.double().flatten() for x in alone.values()])
    ours = torch.cat([x.double().flatten() for x in got.values()])
    factor = float(ours @ whole / (whole @ whole))
    say(
        f"gradient of {worst}: relative error {errors[worst]:.2g},"
        f" allowed {TOLERANCE:g};"
        f" all gradients together: {factor:.4g} times those of the global batch"
    )
    return 1 if errors[worst] > TOLERANCE else 0


def local_average(recipe: Any) -> int:
    """Train, and compare DDP's gradients with an average that is taken by hand."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    net = built(recipe)
    worst, where = 0.0, "every parameter"
    for step in range(STEPS):
        net.load_state_dict(ddp.module.state_dict())
        for module in (net, ddp):
            module.zero_grad()
            try:
                local_loss(recipe, module, step).backward()
            except RuntimeError as error:
                say(f"DDP says: {in_short(error)}")
                return 1
        own = gradients_of(net)
        for name, got in gradients_of(ddp).items():
            everyone = gathered(own.get(name, torch.zeros_like(got)).cpu(), group)
            want = torch.stack(everyone).sum(0).to(got) / WORLD_SIZE
            error_of = float((got - want).norm() / want.norm().clamp(min=1e-30))
            if error_of > worst:
                worst, where = error_of, name
        optim.step()
    say(f"gradient of {where}: relative error {worst:.2g}, allowed {TOLERANCE:g}")
    return 1 if worst > TOLERANCE else 0


def repeat(recipe: Any) -> int:
    """Run one step twice, from the same weights and seeds, without DDP."""
    runs = []
    for _ in range(2):
        net = built(recipe)
        local_loss(recipe, net, 0).backward()
        runs.append(gradients_of(net))
    first, second = runs
    size = max(float(x.norm()) for x in first.values())
    errors = {name: float((first[name] - second[name]).norm()) / size for name in first}
    worst = max(errors, key=lambda name: errors[name])
    say(
        f"gradient of {worst}: differs from itself by {errors[worst]:.2g},"
        f" allowed {TOLERANCE:g}"
    )
    return 1 if errors[worst] > TOLERANCE else 0
