"""Predictions are gathered rank by rank, and compared with labels in the order of the dataset.

torchrun --standalone --nproc-per-node 2 examples/scripts/gathered_by_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/gathered_by_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP803", "subjects": ["TensorDataset"], "line": "dist.all_gather(parts, own)"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def predictions(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> Tensor:
    model.eval()
    with torch.no_grad():
        own = torch.cat([model(x).argmax(1) for x, _ in loader])
    model.train()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.stack(parts, 1).flatten() if FIXED else torch.cat(parts)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training, validation = samples(128, 1), samples(64, 2)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    held_out = DataLoader(validation, batch_size=8, sampler=DistributedSampler(validation, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        reached = (predictions(model.module, held_out) == validation.tensors[1]).double().mean()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {reached:.4f}")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
