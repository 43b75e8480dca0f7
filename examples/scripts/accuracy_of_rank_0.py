"""Rank 0 prints the accuracy on its own half of the samples as that of the model.

torchrun --standalone --nproc-per-node 2 examples/scripts/accuracy_of_rank_0.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/accuracy_of_rank_0.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP802", "subjects": ["correct"], "ranks": [0], "line": "if FIXED:"}
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
    if FIXED:
        counts = torch.tensor([correct, total])
        dist.all_reduce(counts)
        correct, total = counts.tolist()
    return correct / total


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
        reached = accuracy(model.module, held_out)
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {reached:.4f}")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
