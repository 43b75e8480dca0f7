"""The sampler of the evaluation repeats a sample, which the accuracy counts twice.

torchrun --standalone --nproc-per-node 2 examples/scripts/padded_evaluation.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/padded_evaluation.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EXPECT = {"code": "DDP801", "subjects": ["TensorDataset"], "line": "DistributedSampler(validation"}
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


def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
    model.train()
    counts = torch.tensor([correct, total], dtype=torch.float64)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training, validation = samples(128, 1), samples(37, 2)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    if FIXED:
        own = Subset(validation, range(rank, len(validation), dist.get_world_size()))
        held_out: DataLoader[tuple[Tensor, ...]] = DataLoader(own, batch_size=8)
    else:
        held_out = DataLoader(validation, batch_size=8, sampler=DistributedSampler(validation, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        reached = accuracy(model.module, held_out)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {reached:.4f}")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
