"""DDP's gradient is not the average of the ranks' own gradients."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    WORLD_SIZE,
    gathered,
    gradients_of,
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
    TOLERANCE,
    target,
)


def main() -> int:
    """Train, and compare DDP's gradients with an average that is taken by hand."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    seed_all(MODEL_SEED)
    net = target.model()
    optim = target.sgd(ddp)
    worst = (0.0, "none")
    for step in range(STEPS):
        net.load_state_dict(ddp.module.state_dict())
        for module in (net, ddp):
            module.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            total(target.loss(module, data)).backward()
        own = gradients_of(net)
        for name, got in gradients_of(ddp).items():
            everyone = gathered(own.get(name, torch.zeros_like(got)), group)
            want = torch.stack([x.to(got) for x in everyone]).sum(0) / WORLD_SIZE
            error = float((got - want).norm() / want.norm().clamp(min=1e-30))
            worst = max(worst, (error, name))
        optim.step()
    error, name = worst
    print(
        f"rank {RANK}: gradient of {name}: relative error {error:.2g},"
        f" allowed {TOLERANCE:g}",
        flush=True,
    )
    return 1 if error > TOLERANCE else 0
