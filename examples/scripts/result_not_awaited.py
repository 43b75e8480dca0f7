"""Gradients that are divided before the asynchronous all_reduce that sums them has ended.

torchrun --standalone --nproc-per-node 2 examples/scripts/result_not_awaited.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/result_not_awaited.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP408", "subjects": ["all_reduce"], "line": "works = [dist.all_reduce"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def average_gradients(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    if FIXED:
        for work in works:
            work.wait()
    for gradient in gradients:
        gradient /= dist.get_world_size()
    if not FIXED:
        for work in works:
            work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
