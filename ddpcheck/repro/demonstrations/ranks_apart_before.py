"""What the ranks built is not the same."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import differences, seed_all, tell
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, TIMEOUT, target


def main() -> int:
    """Build the model on every rank, and compare before DDP's first collective."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    seed_all(MODEL_SEED)
    net = target.model()
    return tell(differences(target.facts(net), dist.group.WORLD), "before wrapping")
