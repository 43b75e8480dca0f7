"""Parameters whose gradient is zero in every step."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    gradients_of,
    listed,
    local_data,
    parameters_of,
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
    """Train, and tell which parameters never get a gradient other than zero."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    asleep = {name for name, p in parameters_of(ddp).items() if p.requires_grad}
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        total(target.loss(ddp, data)).backward()
        asleep -= {
            name for name, gradient in gradients_of(ddp).items() if gradient.any()
        }
        optim.step()
    print(f"rank {RANK}: always zero: {listed(sorted(asleep))}", flush=True)
    return 1 if asleep else 0
