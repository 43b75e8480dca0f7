"""no_sync that saves nothing, or that leaves gradients of the ranks' own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.repro.demonstrations.facts import gradients
from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    differences,
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
    """Train, and count the calls of no_sync and the forward passes under it."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    wrapper = next(m for m in ddp.modules() if isinstance(m, DistributedDataParallel))
    no_sync = wrapper.no_sync
    calls = 0
    forwards: list[bool] = []

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return no_sync()

    wrapper.no_sync = counted  # type: ignore[method-assign]
    wrapper.register_forward_pre_hook(
        lambda module, given: forwards.append(module.require_backward_grad_sync)
    )
    faults = 0
    for step in range(STEPS):
        optim.zero_grad()
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        total(target.loss(ddp, data)).backward()
        faults += tell(differences(gradients(ddp), group), f"gradients in step {step}")
        optim.step()
    print(
        f"rank {RANK}: no_sync called {calls} times, {forwards.count(False)} of"
        f" {len(forwards)} forward passes under it",
        flush=True,
    )
    return 1 if faults or (calls and all(forwards)) else 0
