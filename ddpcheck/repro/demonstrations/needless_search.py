"""find_unused_parameters=True, and every parameter is used."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
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
    """Train, and count the parameters that DDP searches for and does not find."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    unused = 0
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        total(target.loss(ddp, data)).backward()
        unused += sum(
            p.grad is None for p in parameters_of(ddp).values() if p.requires_grad
        )
        optim.step()
    searched = ddp.find_unused_parameters
    print(
        f"rank {RANK}: find_unused_parameters={searched}, unused: {unused}", flush=True
    )
    return 1 if searched and not unused else 0
