"""Rank 0 saves with an extra barrier, which pairs up with the last barrier of the others.

torchrun --standalone --nproc-per-node 2 examples/scripts/barrier_on_rank_0.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/barrier_on_rank_0.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP403", "subjects": ["barrier"], "ranks": [0], "line": "dist.barrier()  # in the branch"}
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
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        print("saving")
        if not FIXED:
            dist.barrier()  # in the branch of one rank
    dist.barrier()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
