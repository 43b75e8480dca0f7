"""The dataset gets the number of each epoch, and persistent workers keep the copy of the first.

torchrun --standalone --nproc-per-node 2 examples/scripts/workers_of_first_epoch.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/workers_of_first_epoch.py [--fixed]
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

EXPECT = {"code": "DDP506", "subjects": ["Samples"], "cause": "keep their first copy", "line": "DataLoader("}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Samples(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch))
        yield from self.x[order[dist.get_rank() :: dist.get_world_size()]]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Samples()
    loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=not FIXED)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        data.epoch = epoch
        for x in loader:
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
