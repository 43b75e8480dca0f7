"""A branch that only rank 0 takes: the others never finish its gradients, and rank 0 waits for them.

torchrun --standalone --nproc-per-node 2 examples/scripts/branch_by_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/branch_by_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP104", "subjects": ["auxiliary.weight", "auxiliary.bias"], "ranks": [1]}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.auxiliary = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        out: Tensor = self.head(features)
        if FIXED or dist.get_rank() == 0:
            out = out + self.auxiliary(features)
        return out


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
