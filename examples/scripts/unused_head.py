"""A head that the forward pass does not read: plain DDP raises one step late, without a name.

torchrun --standalone --nproc-per-node 2 examples/scripts/unused_head.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/unused_head.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP101",
    "subjects": ["auxiliary.weight", "auxiliary.bias"],
    "line": "self.auxiliary(features) if FIXED",
}
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
        return out + self.auxiliary(features) if FIXED else out


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
