"""Rank 0 loads an adapter and puts it around a layer; the others wrap the plain model.

torchrun --standalone --nproc-per-node 2 examples/scripts/adapters_on_one_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/adapters_on_one_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP201",
    "ranks": [1],
    "line": "model[2] = Adapted(",
    "cause": "2 is Adapted on rank 0 and Linear on rank 1",
}
FIXED = "--fixed" in sys.argv


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if FIXED or rank == 0:
        model[2] = Adapted(nn.Linear(16, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (wrapped(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
