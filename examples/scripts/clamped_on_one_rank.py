"""A rank clamps weights after a test on only its samples: from then on the replicas differ.

torchrun --standalone --nproc-per-node 2 examples/scripts/clamped_on_one_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/clamped_on_one_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP306",
    "ranks": [1],
    "subjects": ["0.weight", "0.bias", "2.weight"],
    "cause": "differ between ranks",
    "line": "parameter.clamp_(",
}
FIXED = "--fixed" in sys.argv


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = (1 + 4 * rank) * torch.randn(4, 8, generator=own)
        optimizer.zero_grad()
        model(x).sub(x.mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        largest = x.abs().max()
        if FIXED:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        if largest > 5:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
