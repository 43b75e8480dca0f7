"""A layer that is used twice is checkpointed re-entrantly, so that its gradient comes twice.

torchrun --standalone --nproc-per-node 2 examples/scripts/reentrant_checkpoint.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/reentrant_checkpoint.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

EXPECT = {"code": "DDP406", "line": "checkpoint(self.body", "cause": "re-entrant checkpoint"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x)
        for _ in range(2):
            features = checkpoint(self.body, features, use_reentrant=not FIXED)
        out: Tensor = self.head(features.relu())
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
