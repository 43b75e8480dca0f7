"""A generator of numpy's has the same seed on every rank, and its noise is added to the samples in the training step.

torchrun --standalone --nproc-per-node 2 examples/scripts/same_noise_of_numpy.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/same_noise_of_numpy.py [--fixed]
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP510", "subjects": ["training step"], "line": "np.random.default_rng(7"}
FIXED = "--fixed" in sys.argv


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    noise = np.random.default_rng(7 + rank if FIXED else 7)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            x = x + torch.from_numpy(noise.normal(0.0, 0.2, x.shape)).float()
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
