"""Rank 0 evaluates for longer than the timeout of the process group, and the others wait in backward.

torchrun --standalone --nproc-per-node 2 examples/scripts/short_timeout.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/short_timeout.py [--fixed]
"""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP402", "ranks": [0], "cause": "for longer than the timeout of 3 s"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def evaluate(model: nn.Module, seconds: float) -> None:
    began = time.monotonic()
    with torch.no_grad():
        while time.monotonic() - began < seconds:
            model(torch.randn(64, 8))


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60 if FIXED else 3))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for step in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if rank == 0 and step == 8:
            evaluate(model.module, seconds=7)
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
