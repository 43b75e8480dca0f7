"""A branch that every second step leaves out.

torchrun --standalone --nproc-per-node 2 examples/scripts/branch_by_step.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/branch_by_step.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP105", "subjects": ["auxiliary.weight", "auxiliary.bias"]}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.auxiliary = nn.Linear(16, 1)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        features = self.body(x).relu()
        out: Tensor = self.head(features)
        return out + self.auxiliary(features) if both else out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for step in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        out = model(x, both=FIXED or step % 2 == 0)
        (out - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
