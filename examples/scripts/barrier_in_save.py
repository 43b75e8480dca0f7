"""Rank 0 alone saves a checkpoint, with a barrier in the function: it pairs up with the last barrier of the others.

They are gone then, and rank 0 waits in the last barrier, which is right.

torchrun --standalone --nproc-per-node 2 examples/scripts/barrier_in_save.py
ddpcheck run --standalone --nproc-per-node 2 --check-timeout 5 examples/scripts/barrier_in_save.py [--fixed]
"""

import io
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP403",
    "ranks": [0],
    "line": "dist.barrier()  # until the file is there",
    "cause": "Rank 0 reaches barrier",
}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def save(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), io.BytesIO())
    dist.barrier()  # until the file is there


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for x in torch.randn(24, 4, 8):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    if FIXED or rank == 0:
        save(model)
    dist.barrier()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
