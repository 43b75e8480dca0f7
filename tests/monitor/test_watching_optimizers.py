"""`watch` on optimizers and hooks over ranks: sharded and local ones, and gradients that the loop averages."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import ddpcheck
from ddpcheck.findings.report import Finding


def train(how: str, *, by_wrapper: bool = False) -> list[tuple[str, str]]:
    """The codes and messages of what is found in a loop of 12 steps."""
    found: list[Finding] = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    wrapper: Any = (
        ddpcheck.CheckedDistributedDataParallel(module, check_consistency=2, on_finding=found.append)
        if by_wrapper
        else nn.parallel.DistributedDataParallel(module)
    )
    parameters = list(wrapper.parameters())
    optimizer: Any = torch.optim.SGD(parameters[rank::world_size] if "parts" in how else parameters, 0.1)
    if how == "zero":
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)
    if "local" in how:
        own, _ = dist.new_subgroups(group_size=1)
        wrapper.register_comm_hook(PostLocalSGDState(None, own, 2), post_localSGD_hook)
    if how == "local":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=3, warmup_steps=2))
    if "noop" in how:
        wrapper.register_comm_hook(None, noop_hook)
    torch.manual_seed(rank)
    watching: dict[str, Any] = {"check_consistency_every": 2, "check_parity_every": 2, "on_finding": found.append}
    watching["ignore"] = ["DDP502"] * ("no_sync" in how)
    with contextlib.closing(wrapper.watch) if by_wrapper else ddpcheck.watch(wrapper, **watching):
        for step in range(12):
            optimizer.zero_grad()
            with wrapper.no_sync() if "no_sync" in how else contextlib.nullcontext():
                wrapper(torch.randn(6, 4)).square().mean().backward()
            for parameter in parameters if how == "noop" else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
            for parameter in parameters if how == "no_sync" and step % 4 == 3 else ():
                dist.all_reduce(parameter.data)
                parameter.data /= world_size
            for number, parameter in enumerate(parameters if how == "parts" else ()):
                dist.broadcast(parameter.data, number % world_size)
    return [(one.code, one.message) for one in found]


@pytest.mark.slow
@pytest.mark.ddp(world_size=2, timeout=60)
def test_healthy_optimizers_over_ranks_are_silent() -> None:
    for how in ("zero", "parts", "local", "noop", "no_sync"):
        assert train(how) == [], how
    assert train("local", by_wrapper=True) == [] == train("noop", by_wrapper=True)


@pytest.mark.slow
@pytest.mark.ddp(world_size=2, timeout=60)
def test_parts_that_nobody_shares_and_averages_that_nobody_makes_are_told() -> None:
    for how, code, words in (
        ("parts, kept", "DDP306", "differ between ranks after 2 steps"),
        ("local, never averaged", "DDP306", "from step 2 on, in which post_localSGD_hook"),
        ("no_sync, never averaged", "DDP306", "in which no_sync leaves each rank"),
        ("noop, never averaged", "DDP301", "differ between ranks after backward"),
    ):
        assert [(found, words in message) for found, message in train(how)] == [(code, True)], how
    assert [code for code, _ in train("local, never averaged", by_wrapper=True)] == ["DDP306"]
