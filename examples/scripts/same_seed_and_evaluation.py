"""Batches are chosen by the same random numbers on every rank, of which rank 0 has drawn more: it alone evaluates.

torchrun --standalone --nproc-per-node 2 examples/scripts/same_seed_and_evaluation.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/same_seed_and_evaluation.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP505", "subjects": ["forward"], "ranks": [1], "line": "1337 + rank"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def draw(data: Tensor) -> Tensor:
    return data[torch.randint(len(data), (4,))]


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor) -> float:
    return sum(float((model(x) - x.sum(1, keepdim=True)).square().mean()) for x in (draw(data) for _ in range(32))) / 32


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1337 + rank if FIXED else 1337)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(24):
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {evaluate(model, data):.3f}")
        x = draw(data)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
