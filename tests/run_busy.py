"""A training script that hangs, or of which one rank works while the others wait, with any backend."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SECONDS = 6.0


def tokenise() -> int:
    end, words = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        words += len("the words of a text".split())
    return words


class Vocabulary:
    """It takes long to pickle."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (tokenise(),)


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        tokenise()
        return gradient


def train(how: str) -> None:
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = net(torch.randn(2, 4)).square().mean()
        if step == 3 and rank == 1:
            if how == "skips backward":
                continue
            if how == "works in backward":
                loss = SlowGradient.apply(loss)
        loss.backward()
        optimizer.step()


def main(how: str, backend: str) -> None:
    if backend == "spinning":
        importlib.import_module("spinning_backend")
    dist.init_process_group(backend)
    rank = dist.get_rank()
    if how != "wraps on rank 0" or rank == 0:
        train(how)
    if how == "skips" and rank == 0:
        dist.all_reduce(torch.ones(1))
    if how == "skips a handle" and rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    if how == "works" and rank == 1:
        tokenise()
    if how == "sleeps before a handle":
        time.sleep(SECONDS * rank)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    if how == "works in a collective":
        dist.all_gather_object([None, None], Vocabulary() if rank == 1 else 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
