"""A checkpoint is loaded with `assign=True` after wrapping: DDP keeps the tensors that were there before.

torchrun --standalone --nproc-per-node 2 examples/scripts/loaded_by_assignment.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/loaded_by_assignment.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP503", "cause": "replaced after wrapping", "line": "load_state_dict"}
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
    saved = Net().state_dict()  # of an earlier run
    model = DistributedDataParallel(Net())
    model.module.load_state_dict(saved, assign=not FIXED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
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
