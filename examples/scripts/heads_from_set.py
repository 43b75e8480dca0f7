"""A head is made for each task of a set, whose order differs between processes.

torchrun --standalone --nproc-per-node 2 examples/scripts/heads_from_set.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/heads_from_set.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP202", "ranks": [1], "line": "self.heads = ", "cause": "iterates over a set of their names"}
FIXED = "--fixed" in sys.argv

TASKS = {"depth": 1, "normals": 3, "edges": 2, "segments": 7, "poses": 6, "lines": 4, "corners": 5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        tasks = sorted(TASKS) if FIXED else set(TASKS)
        self.heads = nn.ModuleDict({task: nn.Linear(16, TASKS[task]) for task in tasks})

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        return torch.cat([head(features) for head in self.heads.values()], dim=1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
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
