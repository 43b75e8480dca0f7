"""Gradients that are zeroed before a step has used them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

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
    """Train, and look at the gradients whenever zero_grad is called."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    lost: set[str] = set()
    start: dict[str, Any] = {}

    def watch(holder: Any) -> None:
        zero_grad = holder.zero_grad

        def watched(*args: Any, **kwargs: Any) -> None:
            there = {n for n, gradient in gradients_of(ddp).items() if gradient.any()}
            zero_grad(*args, **kwargs)
            gone = there - {n for n, g in gradients_of(ddp).items() if g.any()}
            unmoved = {n for n, p in parameters_of(ddp).items() if p.equal(start[n])}
            lost.update(gone & unmoved)

        holder.zero_grad = watched

    for module in ddp.modules():
        watch(module)
    watch(optim)
    for step in range(STEPS):
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        start = {name: p.detach().clone() for name, p in parameters_of(ddp).items()}
        total(target.loss(ddp, data)).backward()
        optim.step()
        for p in ddp.parameters():
            p.grad = None
    print(
        f"rank {RANK}: gradients zeroed that no step has used: {listed(sorted(lost))}",
        flush=True,
    )
    return 1 if lost else 0
