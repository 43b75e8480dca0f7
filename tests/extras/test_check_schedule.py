"""Ranks that are simulated one by one: they make the collectives of real ones, and what differs is told of them."""

from pathlib import Path

import pytest

import ddpcheck
from ddpcheck import cli
from ddpcheck.findings.report import Report
from tests.reports import shown

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
def batch(step):
    return torch.randn(24, 4)
def loss(model, batch):
    return model(batch).square().mean() + more()
def here():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
"""
HEALTHY = """
GROUPS = {}
def wrap(model, device):
    rank, size = here()
    GROUPS["pair"] = [dist.new_group([one, one + 1], backend="gloo") for one in range(0, size, 2)][rank // 2]
    said = [{"width": 4}] if rank == 0 else [None]
    dist.broadcast_object_list(said, src=0)
    assert said[0]["width"] == 4
    mine = [None]
    dist.scatter_object_list(mine, [{"number": one} for one in range(size)] if rank == 0 else None, src=0)
    assert mine[0]["number"] == rank
    return nn.parallel.DistributedDataParallel(model)
def more():
    rank, size = here()
    number, total = torch.ones(1), torch.ones(2)
    dist.all_reduce(number)
    assert int(number) == size
    everyone = [None] * size
    dist.all_gather_object(everyone, "x" * 7)
    assert everyone == ["x" * 7] * size
    dist.all_reduce(total, group=GROUPS["pair"])
    whole = torch.empty(2 * size)
    dist.all_gather_into_tensor(whole, total)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, whole)
    dist.monitored_barrier()
    return part.sum() * 0
"""
IN_SHARDS = """
def wrap(model, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, here()[1] // 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)

def more():
    return 0
"""
ON_ONE_MACHINE = """
def more():
    rank, size = here()
    if rank < 4:
        dist.all_reduce(torch.ones(1))
    return 0
"""
BY_MEAN = """
def more():
    rank, size = here()
    mean = torch.tensor(float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank > mean:
        dist.barrier()
    return 0
"""
RAISES = """
def more():
    if here()[0] == 3:
        raise KeyError("machine 3")
    return 0
"""


def scheduled(folder: Path, tail: str, world_size: int) -> Report:
    file = folder / "recipe.py"
    file.write_text(HEAD + tail)
    return ddpcheck.check_schedule(str(file), world_size=world_size, steps=2)


@pytest.mark.parametrize(
    ("tail", "world_size", "words"),
    [
        (HEALTHY, 6, ["which pair up"]),
        pytest.param(IN_SHARDS, 4, ["all_gather", "reduce_scatter", "all_reduce"], marks=pytest.mark.slow),
        pytest.param(ON_ONE_MACHINE, 4, [], marks=pytest.mark.slow),  # a branch that only larger worlds take
    ],
    ids=["as real ranks", "collectives_of_fully_shard", "a small world"],
)
def test_matching_collectives_are_healthy(tail: str, world_size: int, words: list[str], tmp_path: Path) -> None:
    report = scheduled(tmp_path, tail, world_size)
    assert report.status == "clean", shown(report)
    ranks, collectives = report.checks
    assert ranks.detail == f"{world_size} ranks simulated one by one, 2 steps each"
    assert all(word in collectives.detail for word in words), collectives.detail


@pytest.mark.parametrize(
    ("tail", "world_size", "ranks"),
    [(ON_ONE_MACHINE, 6, (4, 5)), (BY_MEAN, 4, (2, 3))],
    ids=["on one machine", "each rank decides"],
)
def test_ranks_that_diverge_are_named(tail: str, world_size: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    report = scheduled(tmp_path, tail, world_size)
    (finding,) = report.findings
    assert (finding.code, finding.ranks) == ("DDP403", ranks)
    if tail == ON_ONE_MACHINE:
        assert finding.evidence[0].startswith("ranks 0 to 3, collective number ")
        assert finding.evidence[1].startswith("ranks 4 and 5, collective number ")
    assert tail != BY_MEAN or "barrier" in finding.subjects


@pytest.mark.slow
def test_a_rank_that_raises_is_named_by_its_own_number(tmp_path: Path) -> None:
    report = scheduled(tmp_path, RAISES, 6)
    assert report.error is not None and report.error.exit_code == 3
    assert report.error.message.startswith("simulated rank 3 raised KeyError")
    assert [check.status for check in report.checks] == ["error", "skipped"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "0"], "world_size must be a whole number from 1 to 65536, got 0"),
        (["--schedule", "8", "--device", "cuda"], "--device is for real ranks, and --schedule simulates them"),
        (["--schedule", "8", "--matrix"], "--matrix is for real ranks"),
    ],
)
def test_what_cannot_be(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(HEAD + RAISES)
    assert cli.main(["report", str(file), *arguments]) == 2
    assert words in capsys.readouterr().err
