"""`watch` on models that tensor parallelism splits: it compares the replicas of a part, and is silent otherwise."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import ddpcheck
from ddpcheck.findings.report import Finding

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel

from tests.mesh_loops import Net, Shifted, batches, grid, loss_of, split

pytestmark = [pytest.mark.slow, pytest.mark.ddp(world_size=4, timeout=120)]


def codes_under_ddp(changes: bool = False, by_wrapper: bool = False, sequence: bool = False) -> set[str]:
    """The codes of findings in a loop on two replicas of a model that two ranks compute."""
    findings: list[Finding] = []
    mesh = grid(2)
    kind = Net if sequence else Shifted  # whose shift would have a gradient of its part of the sequence
    model = split(kind(), mesh["tp"], sequence=sequence)
    wrapper: Any = (
        ddpcheck.CheckedDistributedDataParallel(
            model, check_consistency=2, on_finding=findings.append, device_mesh=mesh["dp"]
        )
        if by_wrapper
        else DistributedDataParallel(model, device_mesh=mesh["dp"])
    )
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    watching = {"check_consistency_every": 2, "check_parity_every": 2, "on_finding": findings.append}
    for first in (0, 1):  # after a forward pass the module has DTensors in the place of what DDP holds
        with contextlib.nullcontext() if by_wrapper else ddpcheck.watch(wrapper, **watching):
            for number, rows in enumerate(batches(mesh, epochs=1, first=first)):
                optimizer.zero_grad()
                loss_of(wrapper, rows).backward()
                optimizer.step()
                if changes and (first, number) == (1, 1) and mesh["dp"].get_local_rank():
                    parameters["blocks.0.up.weight"].detach().add_(1.0)
    return {finding.code for finding in findings}


def test_replicas_of_a_part_are_compared_with_each_other() -> None:
    assert codes_under_ddp(changes=True) == {"DDP306"}
    assert codes_under_ddp() == codes_under_ddp(sequence=True) == codes_under_ddp(by_wrapper=True) == set()
