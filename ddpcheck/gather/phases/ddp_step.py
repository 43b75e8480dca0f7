"""A step through the wrapper and its reducer, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.gather.ddp.ddp_constructor import hook_loss
from ddpcheck.gather.ddp.loop_events import recorded
from ddpcheck.gather.phases.session import RankState, plain_state, seed_of, the_session
from ddpcheck.gather.state.external_state import put_back
from ddpcheck.gather.state.module_description import fingerprint, fingerprints
from ddpcheck.gather.steps.gradient_distance import against_average, dense, scales
from ddpcheck.gather.steps.training_step import (
    clear_gradients,
    compute_loss,
    run_backward,
    run_optimizer,
    versions,
)
from ddpcheck.worlds import rank as this_rank


def ddp_step(step: int) -> DdpStepEvidence:
    """Forward, backward and optimizer step through the wrapper, compared with the averaged local gradients."""
    session = the_session()
    assert session.wrapped is not None and session.optimizer is not None
    session.calls.clear()
    put_back(session.started)
    this_rank.set_status(f"step {step}: zero_grad")
    run_optimizer(session.optimizer, "zero_grad")
    clear_gradients(session.module)
    for parameter in session.owners.values():  # also of those that the module has no more
        parameter.grad = None
    assert session.wrapper is not None
    since = versions(session.module)
    with recorded(session.module, session.wrapper, session.optimizer) as recorder:
        loss = compute_loss(
            session.recipe, session.wrapped, session.batch, step=step, seed=seed_of(session, step), place="DDP "
        )
        this_rank.set_status(f"step {step}: DDP backward")
        run_backward(loss.total, module=session.module, since=since)
        del loss
        this_rank.set_status(f"step {step}: DDP comparison")
        owners = session.owners
        lossy = hook_loss(session.wrapper)
        floor = scales({name: t for name, t in session.averaged.items() if t is not None}) if lossy else {}
        differences = tuple(
            against_average(
                name,
                None if p.grad is None else dense(p.grad),
                session.averaged.get(name),
                world_size=session.world_size,
                scale=session.scale.get(name, 0.0),
                lossy=lossy,
                floor=floor.get(name, 0.0),
            )
            for name, p in owners.items()
        )
        gradients = {name: 0 if p.grad is None else fingerprint(dense(p.grad)) for name, p in owners.items()}
        computed_with = fingerprints(session.module.named_parameters())
        this_rank.set_status(f"step {step}: optimizer")
        run_optimizer(session.optimizer, "step")
    held = fingerprints(plain_state(session.module))
    return DdpStepEvidence(
        rank=session.rank,
        step=step,
        gradients=gradients,
        parameters=fingerprints(session.module.named_parameters()),
        parameters_before_optimizer=computed_with,
        buffers=fingerprints(session.module.named_buffers()),
        state={name: value for name, value in held.items() if name in session.own_state},
        new_state={name: value for name, value in held.items() if name not in session.own_state},
        optimizer=_optimizer_state(session),
        against_local=differences,
        wrapper_calls=session.calls.get("wrapper", 0),
        inner_calls=session.calls.get("inner", 0),
        events=tuple(recorder.events),
        parameters_after_backward=recorder.values,
    )


def _optimizer_state(session: RankState) -> dict[str, int]:
    assert session.optimizer is not None
    names = {id(p): name for name, p in session.module.named_parameters()}
    found: dict[str, int] = {}
    for parameter, state in getattr(session.optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            label = f"optimizer {names.get(id(parameter), '?')} {key}"
            if isinstance(value, torch.Tensor):
                found[label] = fingerprint(value)
            elif isinstance(value, int | float | bool):
                found[label] = hash(value)
    return found
