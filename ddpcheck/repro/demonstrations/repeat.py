"""The same step twice gives different gradients."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    gradients_of,
    local_data,
    seed_all,
    total,
)
from ddpcheck.repro.stand_in import (
    BACKEND,
    MODEL_SEED,
    STEP_SEEDS,
    TIMEOUT,
    TOLERANCE,
    target,
)


def main() -> int:
    """Run one step twice, from the same weights and seeds, without DDP."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    runs = []
    for _ in range(2):
        seed_all(MODEL_SEED)
        net = target.model()
        data = local_data(0)
        seed_all(STEP_SEEDS[0][RANK])  # only: draws
        total(target.loss(net, data)).backward()
        runs.append(gradients_of(net))
    first, second = runs
    size = max(float(x.norm()) for x in first.values())
    errors = {name: float((first[name] - second[name]).norm()) / size for name in first}
    worst = max(errors, key=lambda name: errors[name])
    print(
        f"rank {RANK}: gradient of {worst}: differs from itself by {errors[worst]:.2g},"
        f" allowed {TOLERANCE:g}",
        flush=True,
    )
    return 1 if errors[worst] > TOLERANCE else 0
