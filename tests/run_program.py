"""A healthy training script; it prints a digest of its weights and random state."""

from __future__ import annotations

import atexit
import hashlib
import pickle
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(1, generator=generator)


class Settings:
    rate = 0.1


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # in one piece: ranks share the pipe
    sys.stdout.flush()


def late() -> None:
    say("late", pickle.loads(pickle.dumps(Settings())).rate, sys.modules["__main__"].__name__, sys.argv[1:])


def train() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(net.parameters(), Settings.rate)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(Data(), world_size, rank)
    loader = DataLoader(Data(), batch_size=4, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    weights = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    digest = hashlib.sha256(weights + torch.get_rng_state().numpy().tobytes()).hexdigest()
    say("rank", rank, *net.state_dict(), digest)


def main() -> None:
    atexit.register(late)
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
