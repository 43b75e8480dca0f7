"""The auxiliary head learns from a detached output: its gradients never come.

torchrun --standalone --nproc-per-node 2 examples/scripts/detached_features.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/detached_features.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP103", "subjects": ["auxiliary.weight", "auxiliary.bias"]}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.auxiliary = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        extra = self.auxiliary(features)
        out: Tensor = self.head(features) + (extra if FIXED else extra.detach())
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
