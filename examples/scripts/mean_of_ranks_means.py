"""The validation loss is the mean of the ranks' means, and a rank has a third of the samples of the other.

torchrun --standalone --nproc-per-node 2 examples/scripts/mean_of_ranks_means.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/mean_of_ranks_means.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EXPECT = {"code": "DDP805", "subjects": ["TensorDataset"], "line": "mean = torch.tensor("}
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


def validation_loss(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += cross_entropy(model(x), y, reduction="sum").item()
            count += len(y)
    model.train()
    if FIXED:
        both = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(both)
        return float(both[0] / both[1])
    mean = torch.tensor(total / count, dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training, validation = samples(128, 1), samples(64, 2)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    by_class = validation.tensors[1].argsort().tolist()
    own = Subset(validation, by_class[:48] if rank == 0 else by_class[48:])  # as files of one class each
    held_out: DataLoader[tuple[Tensor, ...]] = DataLoader(own, batch_size=8)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        reached = validation_loss(model.module, held_out)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {reached:.4f}")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
