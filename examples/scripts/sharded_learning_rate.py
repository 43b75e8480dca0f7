"""A rank steps with a different learning rate: its shards make other updates from those of the others.

torchrun --standalone --nproc-per-node 2 examples/scripts/sharded_learning_rate.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/sharded_learning_rate.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPECT = {
    "code": "DDP223",
    "subjects": ["group 0 lr"],
    "ranks": [1],
    "line": "optimizer = torch.optim.SGD(model.parameters(), lr=lr)",
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
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lr = 0.05 if FIXED or rank == 0 else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
