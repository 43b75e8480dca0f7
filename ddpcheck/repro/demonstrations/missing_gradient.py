"""Parameters that backward reaches, and for which it returns None."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    listed,
    local_data,
    parameters_of,
    seed_all,
    total,
)
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, STEP_SEEDS, TIMEOUT, target


def main() -> int:
    """Tell what autograd leaves without gradient, and what DDP then does not train."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    data = local_data(0)
    seed_all(STEP_SEEDS[0][RANK])  # only: draws
    total(target.loss(net, data)).backward()
    trained = {n: p for n, p in parameters_of(net).items() if p.requires_grad}
    missing = [name for name, p in trained.items() if p.grad is None]

    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)
    before = {name: p.detach().clone() for name, p in parameters_of(ddp).items()}
    total(target.loss(ddp, data)).backward()
    optim.step()
    still = [n for n in missing if parameters_of(ddp)[n].equal(before[n])]
    print(
        f"rank {RANK}: p.grad is None: {listed(missing)};"
        f" DDP did not train: {listed(still)}",
        flush=True,
    )
    return 1 if missing else 0
