"""Rank 0 wraps a second model, which the other ranks do not have, before the one that all train.

torchrun --standalone --nproc-per-node 2 examples/scripts/wrapper_on_rank_0.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/wrapper_on_rank_0.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP403", "ranks": [0], "line": "teacher = DistributedDataParallel(", "cause": "Wrapper number 1"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher: nn.Module = nn.Linear(8, 1)
    if rank == 0 and not FIXED:
        teacher = DistributedDataParallel(teacher)
    model = DistributedDataParallel(Net(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
