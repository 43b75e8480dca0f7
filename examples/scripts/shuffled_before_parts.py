"""Each rank shuffles the list of all samples in a different order, and takes its part of that.

torchrun --standalone --nproc-per-node 2 examples/scripts/shuffled_before_parts.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/shuffled_before_parts.py [--fixed]
"""

import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

EXPECT = {"code": "DDP516", "subjects": ["Samples"], "cause": "a different order", "line": "DataLoader(data"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Samples(Dataset[Tensor]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(self.numbers[index]))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    numbers = list(range(128))
    random.Random(0 if FIXED else rank).shuffle(numbers)
    data = Samples(numbers[rank :: dist.get_world_size()])
    loader = DataLoader(data, batch_size=4, shuffle=True)
    torch.manual_seed(rank)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        for x in loader:
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
