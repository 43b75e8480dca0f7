"""Each rank keeps copies of its part of the records, and a DistributedSampler splits these again.

torchrun --standalone --nproc-per-node 2 examples/scripts/copies_split_again.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/copies_split_again.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EXPECT = {"code": "DDP519", "subjects": ["Records"], "cause": "split twice", "line": "DistributedSampler(data"}
FIXED = "--fixed" in sys.argv


class Records(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, rank: int, parts: int) -> None:
        everything = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.kept = [(x.clone(), x.sum(0, keepdim=True)) for x in everything[rank::parts]]

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.kept[index]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Records(0, 1) if FIXED else Records(rank, dist.get_world_size())
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
