"""Each rank stops when its own loss is small: one leaves the loop, and the others wait in backward.

torchrun --standalone --nproc-per-node 2 examples/scripts/stops_early.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/stops_early.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP405", "ranks": [1], "line": "break", "cause": "by the `break`"}
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    generator = torch.Generator().manual_seed(rank)
    for _ in range(200):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if FIXED:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        if mean < 0.5:
            break
    dist.barrier()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
