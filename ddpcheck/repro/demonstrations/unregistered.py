"""Tensors that receive gradient and are no parameter of the wrapped module."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.repro.demonstrations.pieces import (
    RANK,
    differences,
    leaves,
    local_data,
    seed_all,
    total,
)
from ddpcheck.repro.stand_in import BACKEND, MODEL_SEED, STEP_SEEDS, TIMEOUT, target


def leaves_behind(loss_value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors into which the backward pass of a loss accumulates."""
    pending: list[Any] = [loss_value.grad_fn]
    seen = set(pending)
    found = []
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        pending += following
    return found


def main() -> int:
    """Find the tensors that two steps train and that DDP does not know."""
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    seed_all(MODEL_SEED)
    net = target.model()
    ddp = target.ddp(net)
    known = {id(p) for p in net.parameters()}
    stray: list[dict[int, torch.Tensor]] = []
    for step in range(2):
        data = local_data(step)
        seed_all(STEP_SEEDS[step][RANK])  # only: draws
        loss_value = total(target.loss(ddp, data))
        own = {id(x) for x in leaves(data)}
        stray.append(
            {id(x): x for x in leaves_behind(loss_value) if id(x) not in known | own}
        )
        loss_value.backward()
    kept = [x for key, x in stray[0].items() if key in stray[1]]
    shapes = sorted(str(tuple(x.shape)) for x in kept)
    sizes = sorted(float(x.grad.double().norm()) for x in kept if x.grad is not None)
    apart = bool(differences({"gradients": sizes}, group))
    verdict = "that differ between ranks" if apart else "the same on every rank"
    said = (
        f"gradients for {', '.join(shapes)}, {verdict}"
        if kept
        else "no stray gradients"
    )
    print(f"rank {RANK}: outside of DDP's parameters: {said}", flush=True)
    return 1 if kept else 0
