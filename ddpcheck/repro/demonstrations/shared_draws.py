"""Random numbers that are the same on ranks that were seeded apart."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    gathered,
    local_data,
    seed_all,
)
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, TIMEOUT, target


class Recorder(TorchDispatchMode):
    """Keeps the tensors of random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[tuple[str, list[float]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Draw, then note the numbers."""
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            first = result if isinstance(result, torch.Tensor) else result[0]
            if first.numel() > 1:
                values = first.detach().flatten().tolist()
                self.drawn.append((function.overloadpacket.__name__, values))
        return result


def main() -> int:
    """Seed every rank with a number of its own, and compare what the ranks draw."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    data = gathered(local_data(0), dist.group.WORLD)[0]
    seed_all(1000 + RANK)
    with Recorder() as recorder:
        target.loss(net, data)
    everyone = gathered(recorder.drawn, dist.group.WORLD)
    calls = [*zip(*everyone, strict=False)]
    shared = [call[0][0] for call in calls if all(own == call[0] for own in call)]
    print(
        f"rank {RANK}: draws {len(calls)} times, and the same numbers as every other"
        f" rank {len(shared)} times {shared[:1]}",
        flush=True,
    )
    return 1 if shared else 0
