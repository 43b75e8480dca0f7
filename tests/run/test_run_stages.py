"""`ddpcheck run` on stages of a pipeline: ranks that compute one model by sends and receives, twice, data parallel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_run import run_forked

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
replica, stage = divmod(rank, 2)
replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
peer = rank ^ 1
torch.manual_seed(0)  # the stages are alike, and begin so
model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 6))
place = 0 if sys.argv[1] == "broken" else replica
loader = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=place))
for inputs, targets in loader:
    optimizer.zero_grad()
    if stage == 0:
        made = model(inputs)
        dist.send(made.detach(), peer)
        gradient = torch.empty_like(made)
        dist.recv(gradient, peer)
        made.backward(gradient)
    else:
        made = torch.empty(4, 6)
        dist.recv(made, peer)
        made.requires_grad_()
        nn.functional.mse_loss(model(made), targets).backward()
        dist.send(made.grad, peer)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= 2
    optimizer.step()
dist.destroy_process_group()
"""


def found(tmp_path: Path, how: str) -> list[dict[str, object]]:
    script, saved = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    run_forked(f"--check-output={saved}", str(script), how, ranks=4)
    findings: list[dict[str, object]] = json.loads(saved.read_text())["findings"]
    return findings


@pytest.mark.slow
def test_stages_of_one_model_take_the_same_samples_by_right(tmp_path: Path) -> None:
    assert found(tmp_path, "fixed") == []


@pytest.mark.slow
def test_replicas_of_a_stage_have_samples_of_their_own(tmp_path: Path) -> None:
    findings = found(tmp_path, "broken")
    assert {one["code"] for one in findings} == {"DDP505"}
    assert str(findings[0]["message"]).startswith("Ranks 0 and 2 take the same samples")
