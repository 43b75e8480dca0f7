"""Ranks put the same numbers into a reduction, in another order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    gathered,
    leaves,
    local_data,
    seed_all,
)
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, STEP_SEEDS, TIMEOUT, target


class Recorder(TorchDispatchMode):
    """Keeps what goes into reductions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[list[float]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the numbers, then reduce."""
        if "reduce" in str(function) and "c10d" in function.namespace:
            tensors = [x for x in leaves(args[0]) if isinstance(x, torch.Tensor)]
            self.sent += [x.detach().flatten().tolist() for x in tensors]
        return function(*args, **(kwargs or {}))


def main() -> int:
    """Give every rank the samples of rank 0, and compare what the ranks send."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    data = gathered(local_data(0), dist.group.WORLD)[0]
    seed_all(STEP_SEEDS[0][0])  # only: draws
    with Recorder() as recorder:
        target.loss(net, data)
    faults = 0
    for sent in zip(*gathered(recorder.sent, dist.group.WORLD), strict=False):
        alike = all(sorted(numbers) == sorted(sent[0]) for numbers in sent)
        if alike and any(numbers != sent[0] for numbers in sent):
            numbers = ", ".join(f"{number:.6g}" for number in sent[RANK][:6])
            print(f"rank {RANK}: packs in an order of its own: {numbers}", flush=True)
            faults += 1
    if not faults:
        print(f"rank {RANK}: packs as the others do", flush=True)
    return 1 if faults else 0
