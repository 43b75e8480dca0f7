"""A contrastive loss compares features with those of all ranks, which dist.all_gather gives without a gradient.

torchrun --standalone --nproc-per-node 2 examples/scripts/features_as_constants.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/features_as_constants.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP309", "subjects": ["all_gather"], "cause": "as constants", "line": "dist.all_gather(parts"}
FIXED = "--fixed" in sys.argv


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = normalize(self.body(x), dim=1)
        return out


def of_all_ranks(features: Tensor) -> Tensor:
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    if FIXED:
        parts[dist.get_rank()] = features
    return torch.cat(parts)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(rank)
    for _ in range(12):
        x = torch.randn(4, 8, generator=own)
        noise = 0.1 * torch.randn(2, 4, 8, generator=own)
        first, second = model(torch.cat([x + noise[0], x + noise[1]])).chunk(2)
        first, second = of_all_ranks(first) if FIXED else first, of_all_ranks(second)
        numbers = torch.arange(4 * world_size)
        loss = cross_entropy(first @ second.T / 0.2, numbers if FIXED else numbers[4 * rank : 4 * rank + 4])
        optimizer.zero_grad()
        (loss * world_size if FIXED else loss).backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
