"""Samples that several ranks train on, or none."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    gathered,
    global_data,
    leaves,
    local_data,
)
from ddpcheck.repro.stand_in import BACKEND, STEPS, TIMEOUT


def samples_in(data: Any) -> Counter[tuple[str, ...]]:
    """The rows along dim 0 of what is in a batch, and how often each is there."""
    columns = [
        x for x in leaves(data) if isinstance(x, list) or getattr(x, "ndim", False)
    ]
    columns = [x for x in columns if len(x) == len(columns[0])]
    columns = [x.tolist() if hasattr(x, "tolist") else x for x in columns]
    return Counter(tuple(map(str, row)) for row in zip(*columns, strict=True))


def main() -> int:
    """Compare what the ranks train on in a step with each other, and with the whole."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    faults = 0
    for step in range(STEPS):
        whole = samples_in(global_data(step))
        everyone = gathered(samples_in(local_data(step)), dist.group.WORLD)
        held = sum(everyone, Counter[tuple[str, ...]]())
        again = sum(held[row] > whole[row] for row in everyone[RANK])
        missing = 0 if held - whole and not again else sum((whole - held).values())
        print(
            f"rank {RANK}: step {step}: {again} of its {sum(everyone[RANK].values())}"
            f" samples are on another rank too; {missing} of the {sum(whole.values())}"
            " samples of the global batch are on no rank",
            flush=True,
        )
        faults += again + missing
    return 1 if faults else 0
