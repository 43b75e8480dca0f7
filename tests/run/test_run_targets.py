"""`ddpcheck run` on ranks that augment their samples by random numbers of their own: the same samples, or others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = """
images = torch.randn(256, 3, 6, generator=torch.Generator().manual_seed(1))
labels = torch.randint(0, 5, (256,), generator=torch.Generator().manual_seed(2))
torch.manual_seed(RANK)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(256):
            if HOW == "whole stream" or i % WORLD == RANK:
                yield augmented(images[i : i + 1])[0], labels[i]


def augmented(x):
    return torch.where(torch.rand(len(x), 1, 1) < 0.5, x.flip(-1), x) + 0.1 * torch.randn_like(x)


def batches():
    if "stream" in HOW:
        yield from DataLoader(Stream(), batch_size=8)
        return
    order = torch.Generator().manual_seed(3 + RANK * (HOW == "own order"))
    for step in range(16):
        index = torch.randint(0, 256, (16,), generator=order)
        if HOW == "part":
            index = index[RANK * 8 :][:8]
        y = labels[index]
        if HOW == "classes":  # drawn alike, and in order
            y = y.sort().values
        if HOW == "broadcast":
            dist.broadcast(y, 0)
        x = torch.randn(len(y), 3, 6) if HOW in ("classes", "broadcast") else augmented(images[index])
        yield x, y


for HOW in sys.argv[1:]:
    net = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(18, 5)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("how", ["same order", "whole stream"])
def test_ranks_that_augment_the_same_samples(tmp_path: Path, how: str) -> None:
    findings = run_script(tmp_path, SCRIPT, how).findings
    assert [(f["code"], f["severity"], f["subjects"]) for f in findings] == [("DDP505", "warning", ["targets"])]


@pytest.mark.parametrize("how", ["own order", "part", "stream", "classes", "broadcast"])
def test_ranks_that_augment_samples_of_their_own(tmp_path: Path, how: str) -> None:
    assert run_script(tmp_path, SCRIPT, how).findings == []
