"""Each rank divides its loss by its own number of targets, which differ: a mean of means.

torchrun --standalone --nproc-per-node 2 examples/scripts/sharded_masked_mean.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/sharded_masked_mean.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPECT = {"code": "DDP305", "subjects": ["loss"], "line": "loss = errors / number"}
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(16, 8)
        counts = (x[:, :1] > (-0.5, 0.5)[rank]).float()
        optimizer.zero_grad()
        errors = ((model(x) - x.sum(1, keepdim=True)) * counts).abs().sum()
        number = counts.sum()
        if FIXED:  # fully_shard divides by the world size
            dist.all_reduce(number)
            number /= dist.get_world_size()
        loss = errors / number.clamp(min=1)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
