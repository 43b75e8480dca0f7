"""Each rank divides its loss by the number of its samples that count, and the numbers differ.

torchrun --standalone --nproc-per-node 2 examples/scripts/masked_mean.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/masked_mean.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP305", "subjects": ["loss"], "line": "loss = errors / number"}
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(16, 8)
        counts = (x[:, :1] > (-0.5, 0.5)[rank]).float()
        optimizer.zero_grad()
        errors = ((model(x) - x.sum(1, keepdim=True)) * counts).abs().sum()
        number = counts.sum()
        if FIXED:  # DDP divides by the world size
            dist.all_reduce(number)
            number /= dist.get_world_size()
        loss = errors / number.clamp(min=1)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
