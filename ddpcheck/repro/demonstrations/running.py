"""Training stops: a rank raises, dies or hangs."""

from __future__ import annotations

import faulthandler
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    in_short,
    leaves,
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
    target,
)


def is_empty(data: Any) -> bool:
    """Whether there are no samples in a batch."""
    return 0 in [len(x) for x in leaves(data) if getattr(x, "ndim", 0)]


def told_empty(steps: list[int]) -> int:
    """Say in which steps this rank had nothing to train on."""
    print(f"rank {RANK}: has no samples in steps {steps}", flush=True)
    return 1


def main() -> int:
    """Train, and tell how far this rank comes; one that is stuck shows its stack."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    place, begun = "building the model", time.monotonic()
    empty = []  # only: uneven
    try:
        seed_all(MODEL_SEED)
        net = target.model()
        place = "wrapping"
        ddp = target.ddp(net)
        optim = target.sgd(ddp)
        for step in range(STEPS):
            print(f"rank {RANK}: begins step {step}", flush=True)
            faulthandler.dump_traceback_later(TIMEOUT + 2, exit=True)
            begun = time.monotonic()
            place = f"forward of step {step}"
            optim.zero_grad()
            data = local_data(step)
            if is_empty(data):  # only: uneven
                empty.append(step)  # only: uneven
            seed_all(STEP_SEEDS[step][RANK])  # only: draws
            loss_value = total(target.loss(ddp, data))
            place = f"backward of step {step}"
            loss_value.backward()
            optim.step()
        place = "the barrier after the last step"
        dist.barrier()
        place = "making a group after the last step"
        faulthandler.dump_traceback_later(TIMEOUT + 2, exit=True)
        begun = time.monotonic()
        dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        dist.barrier()
    except Exception as error:
        faulthandler.cancel_dump_traceback_later()
        said = in_short(error)
        print(f"rank {RANK}: failed in {place}: {said}", flush=True)
        if time.monotonic() - begun > TIMEOUT - 1:
            time.sleep(4)  # a rank that is stuck shows its stack meanwhile
        return 1
    faulthandler.cancel_dump_traceback_later()
    if empty:  # only: uneven
        return told_empty(empty)  # only: uneven
    print(f"rank {RANK}: finished", flush=True)
    return 0
