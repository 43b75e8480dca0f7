"""Gradients are divided by the number of micro-batches in the loss, and once more in the reduction.

torchrun --standalone --nproc-per-node 2 examples/scripts/sharded_divided_again.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/sharded_divided_again.py [--fixed]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPECT = {
    "code": "DDP303",
    "subjects": ["head.bias", "head.weight"],
    "line": "model.set_gradient_divide_factor(float(dist.get_world_size() * (1 if FIXED else 2)))",
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


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(float(dist.get_world_size() * (1 if FIXED else 2)))
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        for part in x.split(2):
            loss = (model(part) - part.sum(1, keepdim=True)).square().mean() / 2
            loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
