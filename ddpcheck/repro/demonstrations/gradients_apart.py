"""After backward the ranks do not have the same gradients."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.facts import gradients
from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    differences,
    in_short,
    local_data,
    seed_all,
    tell,
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
    """Train, and compare the gradients of the ranks, bit by bit."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    faults = 0
    try:
        seed_all(MODEL_SEED)
        ddp = target.ddp(target.model())
        optim = target.sgd(ddp)
        for step in range(STEPS):
            optim.zero_grad()
            data = local_data(step)
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            total(target.loss(ddp, data)).backward()
            apart = differences(gradients(ddp), group)
            faults += tell(apart, f"gradients in step {step}")
            optim.step()
    except RuntimeError as error:
        print(f"rank {RANK}: DDP says: {in_short(error)}", flush=True)
        faults += 1
    return 1 if faults else 0
