"""DDP's gradient is not that of the global batch."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    backward,
    gradients_of,
    local_data,
    seed_all,
    single_process,
)
from ddpcheck.repro.stand_in import (
    BACKEND,
    MODEL_SEED,
    STEP_SEEDS,
    STEPS,
    TIMEOUT,
    TOLERANCE,
    target,
)


def main() -> int:
    """Compare DDP on shards with one process on the whole batch."""
    alone = single_process()
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        backward(ddp, data)
        if step + 1 < STEPS:
            optim.step()
    together = gradients_of(ddp)

    whole = torch.cat([want.double().flatten() for want in alone.values()])
    got = torch.cat(
        [together.get(n, 0 * w).double().flatten() for n, w in alone.items()]
    )
    errors = {}
    for name, want in alone.items():
        apart = (together.get(name, 0 * want) - want).double().norm()
        errors[name] = float(apart / max(want.double().norm(), 0.01 * whole.norm()))
    worst = max(errors, key=lambda name: errors[name])
    factor = float(got @ whole / (whole @ whole))
    print(
        f"rank {RANK}: gradient of {worst}: relative error {errors[worst]:.2g},"
        f" allowed {TOLERANCE:g};"
        f" all gradients together: {factor:.4g} times those of the global batch",
        flush=True,
    )
    return 1 if errors[worst] > TOLERANCE else 0
