"""`watch` on models that tensor parallelism splits: what it tells in the data dimension, and that it is silent."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp

import ddpcheck
from ddpcheck.findings.report import Finding

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.mesh_loops import LENGTH, WORDS, Net, Shifted, batches, grid, loss_of, sharded, split

pytestmark = [pytest.mark.slow, pytest.mark.ddp(world_size=4, timeout=120)]


def _sum(group, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation that is a string
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def found_under_ddp(how: str, *, by_wrapper: bool = False, sequence: bool = False) -> list[str]:
    """The codes of what is found in a loop on two replicas of a model that two ranks compute."""
    found: list[Finding] = []
    mesh = grid(2)
    kind = Net if sequence else Shifted  # whose shift would have a gradient of its part of the sequence
    model = split(kind(seed=mesh["dp"].get_local_rank() * (how == "start")), mesh["tp"], sequence=sequence)
    options: Any = {"device_mesh": mesh["dp"], "init_sync": how != "start"}
    wrapper: Any = (
        ddpcheck.CheckedDistributedDataParallel(model, check_consistency=2, on_finding=found.append, **options)
        if by_wrapper
        else DistributedDataParallel(model, **options)
    )
    parameters = dict(model.named_parameters())
    if how == "sum":
        wrapper.register_comm_hook(mesh["dp"].get_group(), _sum)
    if how == "noop":
        wrapper.register_comm_hook(None, noop_hook)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    watching = {"check_consistency_every": 2, "check_parity_every": 2, "on_finding": found.append}
    for first in range(1 if how else 2):  # after a forward pass the module has DTensors in the place of what DDP holds
        with contextlib.nullcontext() if by_wrapper else ddpcheck.watch(wrapper, **watching):
            for number, rows in enumerate(batches(mesh, epochs=1, first=first)):
                optimizer.zero_grad()
                loss_of(wrapper, rows).backward()
                optimizer.step()
                if (how, number) == ("changed", 1) and mesh["dp"].get_local_rank():
                    parameters["blocks.0.up.weight"].detach().add_(1.0)
    return sorted({one.code for one in found})


def found_within_a_model(how: str, *, under_ddp: bool = False) -> list[str]:
    """The codes of what is found in a loop of models that two ranks compute, each of which has something else."""
    found: list[Finding] = []
    mesh = grid(2)
    own = mesh["tp"].get_local_rank()
    model: Any = Shifted(seed=own * (how == "start"))
    model = split(model, mesh["tp"], sequence=how == "norms", norms=how != "norms")
    parameters = dict(model.named_parameters())
    if under_ddp:
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
        parameters = dict(model.module.named_parameters())
    else:
        model = sharded(model, mesh["dp"])
        parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank() if how == "data" else mesh["dp"].get_local_rank())
    with ddpcheck.watch(model, check_consistency_every=2, on_finding=found.append):
        for _ in range(12):
            optimizer.zero_grad()
            loss_of(model, torch.randint(WORDS, (4, LENGTH + 1), generator=generator)).backward()
            if how == "clip":
                shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters.values()]
                norm = torch.stack([shard.norm() for shard in shards]).norm()
                for shard in shards:
                    shard.mul_(0.5 / norm)
            optimizer.step()
    return sorted({one.code for one in found})


def found_under_fsdp() -> list[Finding]:
    found: list[Finding] = []
    mesh = grid(2)
    model = sharded(split(Net(), mesh["tp"], sequence=True), mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with ddpcheck.watch(model, check_consistency_every=2, on_finding=found.append) as watch:
        for rows in batches(mesh):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
        assert watch.step == 12
    return found


TOLD = {"start": "DDP208", "sum": "DDP303", "noop": "DDP301", "changed": "DDP306"}


def test_replicas_of_a_part_are_compared_with_each_other() -> None:
    found = {how: found_under_ddp(how) for how in TOLD}
    assert found == {how: [code] for how, code in TOLD.items()}
    assert found_under_ddp("start", by_wrapper=True) == ["DDP208"]


def test_healthy_loops_are_silent_also_where_they_are_watched_after_a_first_forward_pass() -> None:
    assert found_under_ddp("") == [] == found_under_ddp("", sequence=True)
    assert found_under_ddp("", by_wrapper=True) == []
    assert found_under_fsdp() == []


TOLD_WITHIN = {"start": "DDP208", "norms": "DDP301", "data": "DDP516", "clip": "DDP306"}


@pytest.mark.parametrize("under_ddp", [True, False])
def test_ranks_that_compute_one_model_are_compared_with_each_other(under_ddp: bool) -> None:
    found = {how: found_within_a_model(how, under_ddp=under_ddp) for how in ("", *TOLD_WITHIN)}
    assert found == {"": [], **{how: [code] for how, code in TOLD_WITHIN.items()}}
