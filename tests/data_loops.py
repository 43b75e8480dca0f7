"""Loops over loaders, faults and healthy ones, by name; ranks run those that are named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

FAULTS = {
    "workers_of_a_shuffled_set": ("DDP506", "persistent_workers=True"),
    "split_once_more": ("DDP519", "DistributedSampler("),
    "ranks_of_a_node": ("DDP505", "DistributedSampler("),
    "counts_of_a_row": ("DDP305", "group=row.get_group()"),
    "two_networks_alike": ("DDP505", "generator=draw"),
    "resumed_by_islice": ("DDP506", "while epoch < 4"),
}
"""By name, the code of the finding, and what its line has."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    optimizer.step()


def train_epochs(loader: DataLoader[Any], sampler: Any, data: Any = None) -> None:
    """Three epochs, each in an order of its own; the stage of `data` is that of the epoch."""
    model, optimizer = begun()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if data is not None:
            data.stage = epoch
        for batch in loader:
            train(model, optimizer, batch[0] if isinstance(batch, list) else batch)


def begun(width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class Masked(Dataset[Tensor]):
    """Which of the numbers of a row are hidden depends on `stage`; or nothing does, but for a count of the epochs."""

    def __init__(self, *, hides: bool) -> None:
        self.rows = torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
        self.stage, self.hides = 0, hides

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index].clone()
        row[(index + self.stage * self.hides) % 6] = 0.0
        return row


def _in_stages(data: Masked) -> None:
    order: DistributedSampler[Tensor] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=order, num_workers=1, persistent_workers=True)
    train_epochs(loader, order, data)


def workers_of_a_shuffled_set() -> None:
    _in_stages(Masked(hides=True))


def workers_of_a_set_that_counts_epochs() -> None:
    _in_stages(Masked(hides=False))


class EveryOther(BatchSampler):
    """The batches of one rank, of another batch sampler, as a framework deals them."""

    def __init__(self, batches: BatchSampler) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from list(self.batches)[dist.get_rank() :: dist.get_world_size()]

    def __len__(self) -> int:
        return len(self.batches) // dist.get_world_size()


def split_once_more() -> None:
    data = list(torch.randn(96, 6, generator=torch.Generator().manual_seed(2)))
    sampler: DistributedSampler[Tensor] = DistributedSampler(data)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_sampler=EveryOther(BatchSampler(sampler, 4, drop_last=True)))  # type: ignore[arg-type]
    train_epochs(loader, sampler)


class Prefetcher:
    """The next batch is taken before one is trained on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batches = iter(loader)
        self.waiting = next(self.batches, None)

    def next(self) -> Any:
        batch, self.waiting = self.waiting, next(self.batches, None)
        return batch


def prefetched_later() -> None:
    """Without it at first; and left before the end in the last epoch."""
    model, optimizer = begun()
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        if epoch < 2:
            for (x,) in loader:
                train(model, optimizer, x)
            continue
        ahead = Prefetcher(loader)
        for _ in range(8 if epoch == 2 else 5):
            (x,) = ahead.next()
            train(model, optimizer, x)


def resumed_by_islice() -> None:
    model, optimizer = begun()
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    epoch = 0
    while epoch < 4:
        first, last = {1: (0, 5), 2: (3, None)}.get(epoch, (0, None))
        if epoch == 2:  # as another run begins
            sampler = DistributedSampler(data)
        else:
            sampler.set_epoch(epoch)
        for (x,) in itertools.islice(DataLoader(data, batch_size=4, sampler=sampler), first, last):
            train(model, optimizer, x)
        epoch += 1


class Repeated(Sampler[int]):
    """Each sample is dealt to as many ranks as it comes in a row."""

    def __init__(self, size: int, times: int) -> None:
        self.size, self.times, self.epoch = size, times, 0
        self.total_size = size * times

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        dealt = order.repeat_interleave(self.times).tolist()
        return iter(dealt[dist.get_rank() : self.total_size : dist.get_world_size()][: len(self)])

    def __len__(self) -> int:
        return self.size // dist.get_world_size()


class Noisy(Masked):
    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + 0.1 * torch.randn(6)


def repeated_augmentation() -> None:
    model, optimizer = begun()
    torch.manual_seed(10 + dist.get_rank())
    sampler = Repeated(80, dist.get_world_size())
    loader = DataLoader(Noisy(hides=False), batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.epoch = epoch
        for x in loader:
            train(model, optimizer, x)


def two_networks_alike(seed: int = 4) -> None:
    """Both are averaged before the optimizers step."""
    torch.manual_seed(0)
    both = [nn.Linear(6, 8), nn.Linear(6, 5)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in both]
    draw = torch.Generator().manual_seed(seed)
    for _ in range(8):
        x = torch.randn(16, 6, generator=draw)
        sum(one(x).square().mean() for one in both).backward()  # type: ignore[union-attr]
        for one in both:
            for p in one.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_networks() -> None:
    two_networks_alike(5 + dist.get_rank())


# On four ranks


class Ring(torch.autograd.Function):
    """What the rank before has, by send and recv."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return passed(x, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return passed(gradient, ctx.group, -1), None


def passed(x: Tensor, group: Any, step: int) -> Tensor:
    ranks = dist.get_process_group_ranks(group)
    place, got = ranks.index(dist.get_rank()), torch.empty_like(x)
    to, source = ranks[(place + step) % len(ranks)], ranks[(place - step) % len(ranks)]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, got, source)])
    for work in works:
        work.wait()
    return got


class Neighbours(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.mix, self.out = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, part: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.mix(torch.stack([part, Ring.apply(part, self.group)], -1))))
        return out


def ring_of_all_ranks() -> None:
    """Each has a part of the same sequences, without any sampler."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Neighbours(dist.group.WORLD))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(6))
    for epoch in range(3):
        shuffled = torch.Generator().manual_seed(epoch)
        for x in DataLoader(data, batch_size=8, shuffle=True, generator=shuffled):  # type: ignore[arg-type]
            part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
            optimizer.zero_grad()
            (model(part).squeeze(-1) - part).square().mean().backward()
            optimizer.step()


def ranks_of_a_node() -> None:
    """The sampler has the size and the rank of a node, of which there are two."""
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(7)))
    sampler = DistributedSampler(data, num_replicas=2, rank=dist.get_rank() % 2)
    train_epochs(DataLoader(data, batch_size=4, sampler=sampler), sampler)


def counts_of_a_row(*, everywhere: bool = False) -> None:
    """The two ranks of a column have a half of the same sequences each, of which some numbers are missing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    row, column = mesh["row"], mesh["column"]
    model, optimizer = begun(1)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(8)))
    sampler = DistributedSampler(data, num_replicas=2, rank=row.get_local_rank())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            half = x.chunk(2, 1)[column.get_local_rank()].reshape(-1, 1)
            there = half > (0.8 if column.get_local_rank() else -0.8)
            count = there.sum()
            if everywhere:
                dist.all_reduce(count)
            else:
                dist.all_reduce(count, group=row.get_group())
            loss = ((model(half) - half)[there]).square().sum() / count * (4 if everywhere else 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def counts_of_all() -> None:
    counts_of_a_row(everywhere=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        globals()[name]()
    dist.destroy_process_group()
