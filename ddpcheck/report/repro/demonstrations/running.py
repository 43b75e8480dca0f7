"""Training stops: a rank raises, dies or hangs."""

from __future__ import annotations

import faulthandler
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpcheck.report.repro.demonstrations.harness import (
    built,
    in_short,
    leaves,
    local_batch,
    say,
    seed_all,
    wrapped,
)
from ddpcheck.report.repro.demonstrations.settings import (
    RANK,
    STEP_SEEDS,
    STEPS,
    TIMEOUT,
)


def running(recipe: Any) -> int:
    """Train, and tell how far this rank comes; one that is stuck shows its stack."""
    place, begun = "building the model", time.monotonic()
    try:
        net = built(recipe)
        place = "wrapping"
        ddp, optim = wrapped(recipe, net)
        for step in range(STEPS):
            say(f"begins step {step}")
            faulthandler.dump_traceback_later(TIMEOUT + 2, exit=True)
            begun = time.monotonic()
            place = f"forward of step {step}"
            optim.zero_grad()
            data = local_batch(recipe, step)
            seed_all(STEP_SEEDS[step][RANK])
            loss_value = recipe.loss(ddp, data)
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
        say(f"failed in {place}: {in_short(error)}")
        if time.monotonic() - begun > TIMEOUT - 1:
            time.sleep(4)  # a rank that is stuck shows its stack meanwhile
        return 1
    faulthandler.cancel_dump_traceback_later()
    say("finished")
    return 0


def uneven(recipe: Any) -> int:
    """Train as above, and tell in which steps this rank has no samples."""
    shard, sizes = recipe.shard, list[int]()

    def watched(*given: Any) -> Any:
        data = shard(*given)
        tensors = [x for x in leaves(data) if getattr(x, "ndim", 0)]
        sizes.append(min(map(len, tensors), default=1))
        return data

    recipe.shard = watched
    if running(recipe):
        return 1
    empty = [step for step, size in enumerate(sizes) if not size]
    if empty:
        say(f"has no samples in steps {empty}")
    return 1 if empty else 0
