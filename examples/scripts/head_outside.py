"""The criterion has weights that the optimizer trains and no wrapper averages.

torchrun --standalone --nproc-per-node 2 examples/scripts/head_outside.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/head_outside.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP501", "subjects": ["Linear.weight", "Linear.bias"], "cause": "in no DistributedDataParallel"}
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
    model = DistributedDataParallel(Net())
    scale: nn.Module = nn.Linear(1, 1)
    if FIXED:
        scale = DistributedDataParallel(scale)
    optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (scale(model(x)) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
