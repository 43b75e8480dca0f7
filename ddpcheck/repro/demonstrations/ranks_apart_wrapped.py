"""What the ranks have after wrapping is not the same."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import differences, seed_all, tell
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, TIMEOUT, target


def main() -> int:
    """Wrap the model on every rank, and compare before the first step."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    seed_all(MODEL_SEED)
    ddp = target.ddp(target.model())
    optim = target.sgd(ddp)  # only: optimizer
    return tell(differences(target.facts(ddp, optim), group), "after wrapping")
