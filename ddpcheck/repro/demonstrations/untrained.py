"""Parameters that get a gradient and never move."""

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
    """Train, and tell which parameters the optimizer leaves as they are."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    before = {name: p.detach().clone() for name, p in parameters_of(ddp).items()}
    reached = set(before)
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        total(target.loss(ddp, data)).backward()
        reached &= {n for n, gradient in gradients_of(ddp).items() if gradient.any()}
        optim.step()
    held = {id(p) for group in optim.param_groups for p in group["params"]}
    still = [n for n, p in parameters_of(ddp).items() if p.equal(before[n])]
    still = [n for n in still if n in reached]
    lacking = [n for n in still if id(parameters_of(ddp)[n]) not in held]
    print(
        f"rank {RANK}: have gradients and do not move: {listed(still)};"
        f" not held by the optimizer: {listed(lacking)}",
        flush=True,
    )
    return 1 if still else 0
