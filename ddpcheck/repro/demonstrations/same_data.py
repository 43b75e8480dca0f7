"""Ranks train on the same samples."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ddpcheck.repro.demonstrations.facts import batch_values
from ddpcheck.repro.demonstrations.pieces import RANK, differences, local_data
from ddpcheck.repro.stand_in import BACKEND, TIMEOUT


def main() -> int:
    """Compare what the ranks train on in the first step."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    data = local_data(0)
    apart = bool(differences(batch_values(data), dist.group.WORLD))
    verdict = (
        "other data than the other ranks" if apart else "the same data as every rank"
    )
    print(f"rank {RANK}: has {verdict}", flush=True)
    return 0 if apart else 1
