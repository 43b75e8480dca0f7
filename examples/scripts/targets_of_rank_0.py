"""Each row of a rank is to be matched with its own view, and the targets are those of rank 0's rows.

torchrun --standalone --nproc-per-node 2 examples/scripts/targets_of_rank_0.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/targets_of_rank_0.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP804", "subjects": ["cross_entropy"], "ranks": [1], "line": "return cross_entropy("}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.head(self.body(x).relu()), dim=1)


def loss_of(first: Tensor, second: Tensor) -> Tensor:
    everyone = torch.cat(all_gather(second))
    targets = torch.arange(len(first)) + (dist.get_rank() * len(first) if FIXED else 0)
    return cross_entropy(first @ everyone.T / 0.1, targets)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(16, 8)
        first, second = model(torch.cat([x + 0.1 * torch.randn(16, 8), x + 0.1 * torch.randn(16, 8)])).chunk(2)
        optimizer.zero_grad()
        loss_of(first, second).backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
