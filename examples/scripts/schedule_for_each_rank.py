"""The schedule makes a step for each rank in each step of the optimizer, and ends halfway.

torchrun --standalone --nproc-per-node 2 examples/scripts/schedule_for_each_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/schedule_for_each_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP507", "subjects": ["learning rate"], "line": "schedule.step()"}
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
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        for _ in range(1 if FIXED else dist.get_world_size()):
            schedule.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
