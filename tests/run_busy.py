"""A training script in which one rank works, or starts an asynchronous collective late, while the other waits."""

from __future__ import annotations

import importlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = 6.0


def tokenise() -> int:
    end, words = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        words += len("the words of a text".split())
    return words


def train() -> None:
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()


def main(how: str, backend: str) -> None:
    if backend == "spinning":
        importlib.import_module("spinning_backend")
    dist.init_process_group(backend)
    rank = dist.get_rank()
    train()
    if how == "works" and rank == 1:
        tokenise()
    if how == "sleeps before a handle":
        time.sleep(SECONDS * rank)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
