"""`ddpcheck run` on scripts whose gradients have the wrong scale, or are of different steps on each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SKIPS = """
rows = torch.randn(96, 6)
rows[[0, 95]] = float("inf")  # the first batch of rank 0, and the last one of rank 1
data = TensorDataset(rows)
net = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.01)


def loss_of(x):
    return net(x).square().mean()


for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
    loss = loss_of(x)
    usable = loss.isfinite().float()
    if HOW == "together":
        dist.all_reduce(usable, dist.ReduceOp.MIN)
    if usable:  # decides
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
BUCKETS = """
def average(bucket):
    joined = torch.cat([p.grad.flatten() for p in bucket])
    if how.endswith("divided before"):
        joined /= WORLD
    dist.all_reduce(joined)  # sums
    if how.endswith("divided"):
        joined.div_(WORLD)
    for p, part in zip(bucket, joined.split([p.numel() for p in bucket])):
        p.grad = part.view_as(p).clone()


for how in sys.argv[1:]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    parameters = list(net.parameters())
    kind = torch.optim.SGD if how.startswith("sgd") else torch.optim.AdamW
    optimizer = kind(parameters, 0.01)
    torch.manual_seed(7 + RANK)
    for _ in range(16):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        loss = cross_entropy(net(x), x.argmax(1) % 3)
        loss.backward()
        seen = torch.stack([loss.detach(), loss.detach() ** 2, x.mean(), x.std(), x.max(), x.min()])
        dist.all_reduce(seen)
        average(parameters[:2])
        average(parameters[2:])
        if "clips" in how:
            nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
"""


@pytest.mark.parametrize(("how", "found"), [("alone", [("DDP508", "error")]), ("together", [])])
def test_ranks_that_skip_the_first_and_the_last_backward(
    how: str, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    run = run_script(tmp_path, SKIPS, how)
    assert [(finding["code"], finding["severity"]) for finding in run.findings] == found
    assert all("# decides" in place for place in run.places)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("sgd", [("DDP303", "error")]),
        ("adam, clips", [("DDP303", "warning")]),
        *((how, []) for how in ("sgd, divided", "sgd, clips, divided before", "adam")),
    ],
)
def test_gradients_summed_in_buckets_by_hand(how: str, found: list[tuple[str, str]], tmp_path: Path) -> None:
    run = run_script(tmp_path, BUCKETS, how)
    assert [(finding["code"], finding["severity"]) for finding in run.findings] == found
    assert all("# sums" in place for place in run.places)
