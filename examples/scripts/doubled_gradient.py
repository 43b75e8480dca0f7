"""A hook multiplies gradients that DDP has averaged: a leftover of gradients that were divided by hand.

torchrun --standalone --nproc-per-node 2 examples/scripts/doubled_gradient.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/doubled_gradient.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP303", "cause": "2 (the world size)"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def double(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for parameter in () if FIXED else model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
