"""Every rank uses the same seed, and the training step draws noise and noise levels: the same on every rank.

torchrun --standalone --nproc-per-node 2 examples/scripts/same_noise.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/same_noise.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP510", "subjects": ["training step"], "line": "torch.manual_seed(0)"}
FIXED = "--fixed" in sys.argv


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(10, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        out: Tensor = self.body(x + self.level(level))
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    model = DistributedDataParallel(Denoiser())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if FIXED:
        torch.manual_seed(1 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            level = torch.randint(0, 10, (len(x),))
            noise = torch.randn_like(x)
            optimizer.zero_grad()
            (model(x + 0.1 * level[:, None] * noise, level) - noise).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
