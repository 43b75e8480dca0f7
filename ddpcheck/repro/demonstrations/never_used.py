"""Parameters without gradient, and what DDP makes of them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    in_short,
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
    """Train, and tell which parameters get no gradient and what DDP says."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    missing: set[str] = set()
    said = "nothing"
    try:
        ddp = target.ddp(net)
        optim = target.sgd(ddp)
        for step in range(STEPS):
            optim.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            total(target.loss(ddp, data)).backward()
            named = parameters_of(ddp).items()
            none = {n for n, p in named if p.requires_grad and p.grad is None}
            missing = missing & none if step else none
            optim.step()
    except Exception as error:
        said = in_short(error)
    print(
        f"rank {RANK}: no gradient: {listed(sorted(missing))}; DDP says: {said}",
        flush=True,
    )
    return 1 if missing or said != "nothing" else 0
