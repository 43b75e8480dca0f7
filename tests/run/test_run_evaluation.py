"""`ddpcheck run` on evaluations that one rank makes alone: of the share that a sampler gives it, or of all samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = """
x = torch.randn(104, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)
trained, rest = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])


@torch.no_grad()
def evaluate(model, evaluated):
    total, count = 0.0, 0
    for x, y in evaluated:
        total += cross_entropy(model(x), y, reduction="sum").item()
        count += len(y)
    return total, count


for HOW in sys.argv[1:]:
    loader = DataLoader(trained, 8, sampler=DistributedSampler(trained))
    sampler = DistributedSampler(rest, shuffle=False)
    if "one part" in HOW:
        sampler = DistributedSampler(rest, num_replicas=1, rank=0, shuffle=False)
    evaluated = DataLoader(rest, 8, sampler=None if "all samples" in HOW else sampler)
    net = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
        metric = torch.zeros(2, dtype=torch.float64)
        if RANK == 0 or "all ranks" in HOW:
            metric = torch.tensor(evaluate(net.module, evaluated), dtype=torch.float64)
        if "all ranks" in HOW:
            dist.all_reduce(metric)
        loss = metric[:1] / metric[1:].clamp_min(1)
        if "broadcast" in HOW:
            dist.broadcast(loss, 0)
        if "printed" in HOW and RANK == 0:
            print("loss", loss.item())
        if "pictures" in HOW and RANK == 0:
            print("looked at", len(evaluated))
"""


@pytest.mark.parametrize("how", ["printed", "broadcast"])
def test_one_rank_alone_evaluates_the_share_that_a_sampler_gives_it(tmp_path: Path, how: str) -> None:
    findings = run_script(tmp_path, SCRIPT, how).findings
    assert [(finding["code"], finding["ranks"]) for finding in findings] == [("DDP802", [0])]
    assert "20 of them" in findings[0]["message"]


@pytest.mark.parametrize(
    "how", ["printed, all samples", "broadcast, one part", "printed, broadcast, all ranks", "pictures"]
)
def test_evaluations_of_all_samples(tmp_path: Path, how: str) -> None:
    assert run_script(tmp_path, SCRIPT, how).findings == []
