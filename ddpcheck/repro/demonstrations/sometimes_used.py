"""Parameters that get a gradient on some ranks or in some steps only."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn

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


def unused_by(net: nn.Module, step: int) -> list[str]:
    """The parameters that this rank's backward pass does not reach, without DDP."""
    data = local_data(step)
    seed_all(STEP_SEEDS[step][RANK])  # only: draws
    total(target.loss(net, data)).backward()
    missing = [
        n for n, p in parameters_of(net).items() if p.requires_grad and p.grad is None
    ]
    net.zero_grad()
    return missing


def main() -> int:
    """Ask every rank by itself first, since DDP may hang; then train."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    missing = {step: unused_by(net, step) for step in range(STEPS)}
    steps = [f"step {step}: {listed(names)}" for step, names in missing.items()]
    print(f"rank {RANK}: no gradient in {'; '.join(steps)}", flush=True)

    said = "nothing"
    try:
        seed_all(MODEL_SEED)
        ddp = target.ddp(target.model())
        optim = target.sgd(ddp)
        for step in range(STEPS):
            optim.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            total(target.loss(ddp, data)).backward()
            optim.step()
        tolerated = ddp.find_unused_parameters and not ddp.static_graph
    except Exception as error:
        said = in_short(error)
        tolerated = False
    print(f"rank {RANK}: DDP says: {said}", flush=True)
    return 0 if said == "nothing" and (tolerated or not any(missing.values())) else 1
