"""Batches of one rank are cut to their own length, and code is compiled for one length: it compiles in each step.

torchrun --standalone --nproc-per-node 2 examples/scripts/recompiles_on_one_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/recompiles_on_one_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP522", "subjects": ["Net.forward"], "ranks": [1], "line": "model(x[:, :longest])"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu().mean(1))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.compile(Net(), backend="aot_eager", dynamic=None if FIXED else False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)  # each rank has data of its own
    for step in range(12):
        longest = 12 if rank == 0 else 12 - step % 6  # of the texts of its batch
        x = torch.randn(16, 12, 8)
        optimizer.zero_grad()
        loss = (model(x[:, :longest]) - x.sum((1, 2)).unsqueeze(1)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
