"""Gradients are averaged by hand, and those of the biases are forgotten.

torchrun --standalone --nproc-per-node 2 examples/scripts/forgotten_in_all_reduce.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/forgotten_in_all_reduce.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP501", "subjects": ["Net.body.bias", "Net.head.bias"], "line": "dist.all_reduce(parameter.grad"}
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
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None and (FIXED or parameter.dim() > 1):
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
