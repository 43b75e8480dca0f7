"""Rank 1 has a batch fewer than rank 0: rank 0 waits in backward, rank 1 in the barrier after the loop.

torchrun --standalone --nproc-per-node 2 examples/scripts/uneven_batches.py
ddpcheck run --standalone --nproc-per-node 2 --check-timeout 5 examples/scripts/uneven_batches.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP405", "ranks": [1], "line": "for x in batches", "cause": "after 23 backward passes"}
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
    batches = torch.randn(24 if FIXED or rank == 0 else 23, 4, 8)
    for x in batches:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
