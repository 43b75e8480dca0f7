"""A training script whose ranks are busy while they wait for each other, as they are on a GPU; it hangs, or works."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_Work: Any = dist.distributed_c10d.Work
_Group: Any = dist.ProcessGroup


class SpinningWork(_Work):  # type: ignore[misc]
    """A collective of gloo's; who waits for it asks all the time whether it has ended."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._work.is_completed():
            pass
        return bool(self._work.wait())

    def get_future(self) -> Any:
        self.wait()
        return self._work.get_future()


class SpinningGroup(_Group):  # type: ignore[misc]
    """A process group that has gloo do all."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def getBackendName(self) -> str:
        return "spinning"

    def allreduce(self, *given: Any, **named: Any) -> SpinningWork:
        return SpinningWork(self._gloo.allreduce(*given, **named))

    def allgather(self, *given: Any, **named: Any) -> SpinningWork:
        return SpinningWork(self._gloo.allgather(*given, **named))

    def broadcast(self, *given: Any, **named: Any) -> SpinningWork:
        return SpinningWork(self._gloo.broadcast(*given, **named))

    def barrier(self, *given: Any, **named: Any) -> SpinningWork:
        return SpinningWork(self._gloo.barrier(*given, **named))


def spinning_group(store: Any, rank: int, size: int, timeout: timedelta) -> SpinningGroup:
    return SpinningGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


SECONDS = 9.0


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
    dist.Backend.register_backend("spinning", spinning_group, devices=["cpu"])
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
    if how == "works in a collective":
        dist.all_gather_object([None, None], Vocabulary() if rank == 1 else 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
