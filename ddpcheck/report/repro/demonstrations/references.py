"""Gradients against those of one process, of the ranks, and of a second run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.gather.steps.gradient_distance import scales
from ddpcheck.gather.steps.training_step import step_seed
from ddpcheck.report.repro.demonstrations.harness import *


def global_gradient(
    recipe: Any, quiet: Callable[[nn.Module], Any] = contextlib.nullcontext, in_group: bool = False
) -> int:
    """Compare DDP on shards with one process on the whole batch, which has a group of its own where `in_group`."""

    def last_gradients(module: nn.Module, batch: Callable[[Any, int], Any], rank: int) -> dict[str, torch.Tensor]:
        optim = optimizer_for(recipe, module)
        for step in range(STEPS):
            optim.zero_grad()
            data = batch(recipe, step)
            seed_all(step_seed(SEED, step, rank))
            with quiet(module):
                loss_of(recipe, module, data).backward()
            if step + 1 < STEPS:
                optim.step()
        return named_gradients(module)

    if in_group:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = last_gradients(built(recipe), global_batch, 0)
    if in_group:
        dist.destroy_process_group()
    join()
    return judged(last_gradients(wrapped(recipe, built(recipe))[0], local_batch, RANK), alone)


def local_average(recipe: Any) -> int:
    """Train, and compare DDP's gradients with an average that is taken by hand."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    net = built(recipe)
    faults = 0
    for step in range(STEPS):
        net.load_state_dict(ddp.module.state_dict())
        for module in (net, ddp):
            module.zero_grad()
            try:
                local_loss(recipe, module, step).backward()
            except RuntimeError as error:
                say(f"DDP says: {in_short(error)}")
                return 1
        own, got, want = named_gradients(net), named_gradients(ddp), {}
        for name, x in got.items():
            everyone = gathered(own.get(name, torch.zeros_like(x)).cpu(), group)
            want[name] = torch.stack(everyone).sum(0).to(x) / WORLD_SIZE
        faults += judged(got, want)
        optim.step()
    return 1 if faults else 0


def repeat(recipe: Any) -> int:
    """Run one step twice, from the same weights and seeds, without DDP."""
    runs = []
    for _ in range(2):
        net = built(recipe)
        local_loss(recipe, net, 0).backward()
        runs.append(named_gradients(net))
    return judged(runs[1], runs[0])


def judged(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> int:
    """Say which gradient is furthest from what it should be; returns 1 where that is too far."""
    got = {name: got.get(name, 0 * x) for name, x in want.items()}
    sizes = scales(want)
    errors = {name: float((got[name] - want[name]).double().norm()) / max(sizes[name], 1e-30) for name in sizes}
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # not a number before any
    whole = torch.cat([x.double().flatten() for x in want.values()])
    ours = torch.cat([x.double().flatten() for x in got.values()])
    factor = float(ours @ whole / (whole @ whole))
    say(
        f"gradient of {worst}: relative error {errors[worst]:.2g}, allowed {TOLERANCE:g};"
        f" all gradients together: {factor:.4g} times what they should be"
    )
    return 0 if errors[worst] <= TOLERANCE else 1
