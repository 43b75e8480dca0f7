"""A rank leaves out a layer when its own samples say so, and reduces less than the others.

torchrun --standalone --nproc-per-node 2 examples/scripts/sharded_unused_on_a_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/sharded_unused_on_a_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPECT = {
    "code": "DDP104",
    "subjects": ["extra.weight", "extra.bias"],
    "ranks": [1],
    "line": "self.extra = nn.Linear(16, 1)",
}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.extra = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        out: Tensor = self.head(features)
        mean = x.mean()
        if FIXED:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return out + self.extra(features) if mean > -0.19 else out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
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
