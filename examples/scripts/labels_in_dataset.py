"""A dataset numbers its labels in the order of a set, which each process hashes in its own way.

torchrun --standalone --nproc-per-node 2 examples/scripts/labels_in_dataset.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/labels_in_dataset.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EXPECT = {"code": "DDP516", "subjects": ["Samples.numbers", "data.numbers"], "line": "enumerate(sorted"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        labels = {f"label {number}" for number in range(12)}
        self.numbers = {label: number for number, label in enumerate(sorted(labels) if FIXED else labels)}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], torch.tensor([float(self.numbers[f"label {index % 12}"])])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Samples()
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
