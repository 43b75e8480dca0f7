"""The inputs are normalised by a running mean and variance of only the samples of the rank.

torchrun --standalone --nproc-per-node 2 examples/scripts/own_normaliser.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/own_normaliser.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP217", "subjects": ["normaliser.mean"], "line": "self.mean = self.mean + "}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Normaliser:
    def __init__(self, features: int) -> None:
        self.mean = torch.zeros(features)
        self.var = torch.ones(features)
        self.count = 0.0

    def update(self, x: Tensor) -> None:
        sums = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
        if FIXED:
            dist.all_reduce(sums)
        total, squares, count = sums[:8], sums[8:16], float(sums[16])
        share = count / (self.count + count)
        way = total / count - self.mean
        var = squares / count - (total / count).square()
        self.mean = self.mean + share * way
        self.var = (1 - share) * self.var + share * var + share * (1 - share) * way.square()
        self.count += count

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.var + 1e-8).sqrt()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    normaliser = Normaliser(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank observes an environment of its own
    units = torch.logspace(-1, 1, 8)
    for _ in range(24):
        observed = units * (torch.randn(16, 8) + 1)
        wanted = observed[:, :1]
        normaliser.update(observed)
        optimizer.zero_grad()
        (model(normaliser(observed)) - wanted).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
