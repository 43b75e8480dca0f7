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


def sizes_of(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """What the error of each gradient is relative to.

    Its norm, or what it would be if its elements were as large as those of the others
    in its module: a gradient that is zero but for rounding has no size of its own.
    """
    everything = torch.cat([x.double().flatten() for x in gradients.values()])
    rms = {
        name: float(x.double().norm()) / x.numel() ** 0.5
        for name, x in gradients.items()
        if x.numel()
    }
    floor = 2e-6 * float(everything.norm()) / everything.numel() ** 0.5
    modules: dict[str, float] = {}
    for name, size in rms.items():
        module = name.rpartition(".")[0]
        modules[module] = max(size, modules.get(module, floor))
    return {
        name: modules[name.rpartition(".")[0]] * gradients[name].numel() ** 0.5
        for name in rms
    }


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
    for name, size in sizes_of(alone).items():
        apart = together.get(name, 0 * alone[name]) - alone[name]
        errors[name] = float(apart.double().norm()) / max(size, 1e-30)
    worst = max(errors, key=lambda name: errors[name])
    factor = float(got @ whole / (whole @ whole))
    print(
        f"rank {RANK}: gradient of {worst}: relative error {errors[worst]:.2g},"
        f" allowed {TOLERANCE:g};"
        f" all gradients together: {factor:.4g} times those of the global batch",
        flush=True,
    )
    return 1 if errors[worst] > TOLERANCE else 0
