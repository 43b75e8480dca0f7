"""Gradients are averaged by hand, and each rank starts from different weights.

torchrun --standalone --nproc-per-node 2 examples/scripts/unequal_start.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/unequal_start.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP208", "cause": "an average over different models", "line": "0 if FIXED else rank"}
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
    torch.manual_seed(0 if FIXED else rank)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
