"""The line that a user edits, of faults that are noticed elsewhere: on ranks that run a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked_run import run_forked

BEFORE = """
import random, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIXED = "--fixed" in sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""

IN_BACKWARD = """
class Fused:
    def __init__(self, parameters):
        self.optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in parameters}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.update)  # here

    def update(self, p):
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()

model = DistributedDataParallel(nn.Linear(8, 4))
whole = torch.optim.Adam(model.parameters(), lr=0.01)
fused = None if FIXED else Fused([*model.parameters()])
torch.manual_seed(rank)
for _ in range(8):
    model(torch.randn(4, 8)).square().mean().backward()
    if FIXED:
        whole.step()
        whole.zero_grad()
"""

SCALER = """
def resume(scaler, state):
    scaler.load_state_dict(state)  # here

model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
if FIXED or rank == 1:
    resume(scaler, {**scaler.state_dict(), "scale": 128.0})
torch.manual_seed(rank)
for _ in range(8):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""

RESTORED = """
class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), index / 64) + random.gauss(0.0, 0.1)

random.seed(rank)
state = random.getstate()
if not FIXED:
    boxed = [state]
    dist.broadcast_object_list(boxed, 0)
    state = boxed[0]
random.setstate(state)  # here
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Noisy()
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

BY_HAND = """
def send_from_zero(net):
    for name, p in net.named_parameters():
        if FIXED or "bias" not in name:
            dist.broadcast(p.data, 0)  # here

torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
send_from_zero(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(8):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
"""

STATISTICS = """
class Scaler:
    def __init__(self, features):
        self.middle, self.power, self.seen = torch.zeros(features), torch.ones(features), 0

    def observe(self, x):
        sums = torch.stack([x.mean(0), x.square().mean(0)])
        if FIXED:
            dist.all_reduce(sums)
            sums /= dist.get_world_size()
        self.seen += 1
        self.middle = self.middle + (sums[0] - self.middle) / self.seen  # here
        self.power = self.power + (sums[1] - self.power) / self.seen

    def scaled(self, x):
        return ((x - self.middle) / (self.power - self.middle.square()).clamp_min(1e-6).sqrt()).clamp(-3, 3)

class Trainer:
    def __init__(self):
        self.policy, self.scaler = DistributedDataParallel(nn.Linear(6, 2)), Scaler(6)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.01)

    @torch.no_grad()
    def collect(self):
        rows, x = [], torch.randn(8, 6) + 2
        for _ in range(10):
            self.scaler.observe(x)
            rows.append(self.scaler.scaled(x))
            x = 0.5 * x + torch.randn(8, 6) + 1 + 0.1 * self.policy.module(rows[-1]).sum()
        return torch.cat(rows)

    def train(self):
        for _ in range(5):
            rows = self.collect()
            for part in torch.randperm(80).split(20):
                self.optimizer.zero_grad()
                self.policy(rows[part]).square().mean().backward()
                self.optimizer.step()

trainer = Trainer()
torch.manual_seed(rank)
trainer.train()
"""


def finding(script: str, folder: Path, *arguments: str) -> dict[str, Any] | None:
    """The only finding on a script, if there is one."""
    text = f"{BEFORE}{script}\ndist.destroy_process_group()\n"
    (folder / "train.py").write_text(text)
    done = run_forked(f"--check-output={folder / 'report.json'}", "train.py", *arguments, cwd=folder)
    found = json.loads((folder / "report.json").read_text())["findings"] if (folder / "report.json").exists() else []
    assert len(found) <= 1 and (found or done.returncode == 0), done.stderr
    return next(iter(found), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "script"),
    [
        pytest.param("DDP310", IN_BACKWARD, id="in_backward"),
        pytest.param("DDP217", STATISTICS, id="statistics"),
        pytest.param("DDP301", SCALER, id="scaler"),
        pytest.param("DDP510", RESTORED, id="restored"),
        pytest.param("DDP208", BY_HAND, id="by_hand"),
    ],
)
def test_a_fault_is_at_the_line_to_edit(code: str, script: str, tmp_path: Path) -> None:
    found = finding(script, tmp_path)
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert found is not None and found["code"] == code
    assert lines[found["location"]["line"] - 1].endswith("# here"), found
    assert finding(script, tmp_path, "--fixed") is None
