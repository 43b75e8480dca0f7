"""Rank 0 alone evaluates through the wrapper, whose forward broadcasts buffers: it waits for the others there.

torchrun --standalone --nproc-per-node 2 examples/scripts/evaluates_on_rank_0.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/evaluates_on_rank_0.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP403", "ranks": [0], "line": "model(x)", "cause": "in the branch at"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x)).relu())
        return out


def evaluate(model: nn.Module, batches: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        errors = [(model(x) - x.sum(1, keepdim=True)).abs().mean() for x in batches]
    model.train()
    return float(torch.stack(errors).mean())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    held_out = torch.randn(3, 8, 8)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(2):
        for x in torch.randn(12, 4, 8):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        if rank == 0:
            print(f"error {evaluate(model.module if FIXED else model, held_out):.2f}")
    dist.barrier()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
