"""DDP raises."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    in_short,
    local_data,
    seed_all,
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
    """Train, and tell what DDP says."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    said = "nothing"
    try:
        ddp = target.ddp(net)
        optim = target.sgd(ddp)
        for step in range(STEPS):
            optim.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            total(target.loss(ddp, data)).backward()
            optim.step()
    except Exception as error:
        said = in_short(error)
    print(f"rank {RANK}: DDP says: {said}", flush=True)
    return 1 if said != "nothing" else 0
