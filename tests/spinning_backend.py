"""A backend of which ranks are busy while they wait for each other, as on a GPU: gloo, asked all the time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

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


dist.Backend.register_backend("spinning", spinning_group, devices=["cpu"])
