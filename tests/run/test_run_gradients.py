"""`ddpcheck run` on scripts whose gradients have the wrong scale, or are of different steps on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.test_run_compiled import reported

SKIPS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

together = sys.argv[1] == "together"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
rows = torch.randn(96, 6)
rows[[0, 95]] = float("inf")  # the first batch of rank 0, and the last one of rank 1
data = TensorDataset(rows)
net = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.01)


def loss_of(x):
    return net(x).square().mean()


for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
    loss = loss_of(x)
    usable = loss.isfinite().float()
    if together:
        dist.all_reduce(usable, dist.ReduceOp.MIN)
    if usable:  # decides
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""
BUCKETS = """
import sys
import torch
import torch.distributed as dist
from torch import nn

how = sys.argv[1]
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
parameters = list(net.parameters())
kind = torch.optim.SGD if how.startswith("sgd") else torch.optim.AdamW
optimizer = kind(parameters, 0.01)
torch.manual_seed(7 + dist.get_rank())


def average(bucket):
    joined = torch.cat([p.grad.flatten() for p in bucket])
    if how.endswith("divided before"):
        joined /= size
    dist.all_reduce(joined)  # sums
    if how.endswith("divided"):
        joined.div_(size)
    for p, part in zip(bucket, joined.split([p.numel() for p in bucket])):
        p.grad = part.view_as(p).clone()


for _ in range(16):
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), x.argmax(1) % 3)
    loss.backward()
    seen = torch.stack([loss.detach(), loss.detach() ** 2, x.mean(), x.std(), x.max(), x.min()])
    dist.all_reduce(seen)
    average(parameters[:2])
    average(parameters[2:])
    if "clips" in how:
        nn.utils.clip_grad_norm_(parameters, 0.1)
    optimizer.step()
dist.destroy_process_group()
"""


def line_of(text: str, script: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if text in line)


@pytest.mark.slow
def test_ranks_that_skip_the_first_and_the_last_backward(tmp_path: Path) -> None:
    _, _, (finding,) = reported(tmp_path, "alone", "", SKIPS)
    assert (finding["code"], finding["severity"]) == ("DDP508", "error")
    assert finding["location"] == {"path": "train.py", "line": line_of("# decides", SKIPS)}
    assert reported(tmp_path, "together", "", SKIPS)[2] == []


@pytest.mark.parametrize(
    ("how", "severity"),
    [
        ("sgd", "error"),
        pytest.param("sgd, divided", None, marks=pytest.mark.slow),
        pytest.param("sgd, clips, divided before", None, marks=pytest.mark.slow),
        pytest.param("adam, clips", "warning", marks=pytest.mark.slow),
        pytest.param("adam", None, marks=pytest.mark.slow),
    ],
)
def test_gradients_summed_in_buckets_by_hand(how: str, severity: str | None, tmp_path: Path) -> None:
    found = reported(tmp_path, how, "", BUCKETS)[2]
    where = {"path": "train.py", "line": line_of("# sums", BUCKETS)}
    told = [(one["code"], one["severity"], one["location"]) for one in found]
    assert told == [("DDP303", severity, where)] * (severity is not None)
