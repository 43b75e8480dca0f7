"""The numbers of the labels come from the order of a set, which each process hashes in its own way.

torchrun --standalone --nproc-per-node 2 examples/scripts/labels_from_set.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/labels_from_set.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP516", "subjects": ["numbers"], "cause": "with different values"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    found = {f"label {number}" for number in range(12)}
    numbers = {label: number for number, label in enumerate(sorted(found) if FIXED else found)}
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        y = torch.tensor([[float(numbers[f"label {index}"])] for index in range(4)])
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
