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
    worst, where = 0.0, "every parameter"
    for step in range(STEPS):
        net.load_state_dict(ddp.module.state_dict())
        for module in (net, ddp):
            module.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            try:
                total(target.loss(module, data)).backward()
            except RuntimeError as error:
                print(f"rank {RANK}: DDP says: {in_short(error)}", flush=True)
                return 1
        own = gradients_of(net)
        for name, got in gradients_of(ddp).items():
            everyone = gathered(own.get(name, torch.zeros_like(got)).cpu(), group)
            want = torch.stack(everyone).sum(0).to(got) / WORLD_SIZE
            error_of = float((got - want).norm() / want.norm().clamp(min=1e-30))
            if error_of > worst:
                worst, where = error_of, name
        optim.step()
    print(
        f"rank {RANK}: gradient of {where}: relative error {worst:.2g},"
        f" allowed {TOLERANCE:g}",
        flush=True,
    )
    return 1 if worst > TOLERANCE else 0
