"""What the ranks have after a step is not the same."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    differences,
    local_data,
    seed_all,
    tell,
    total,
)
from ddpcheck.repro.stand_in import (
    BACKEND,
    MODEL_SEED,
    STEP_SEEDS,
    STEPS,
    TIMEOUT,
    target,
)


def main() -> int:
    """Train, and compare between ranks after every step."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    faults = 0
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        total(target.loss(ddp, data)).backward()
        optim.step()
        apart = differences(target.facts(ddp, optim), group)
        faults += tell(apart, f"after step {step}")
    return 1 if faults else 0
