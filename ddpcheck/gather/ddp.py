"""A step through the wrapper and its reducer, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ddpcheck import rank as this_rank
from ddpcheck.evidence import (
    DdpStepEvidence,
    Difference,
)
from ddpcheck.gather.compare import dense, difference, eps_of, norm, scales
from ddpcheck.gather.describe import fingerprint, fingerprints
from ddpcheck.gather.events import recorded
from ddpcheck.gather.session import Session, plain_state, seed_of, the_session
from ddpcheck.gather.stepping import (
    clear_gradients,
    compute_loss,
)
from ddpcheck.gather.surroundings import put_back
from ddpcheck.graph import named_parameters


def ddp_step(step: int) -> DdpStepEvidence:
    """Forward, backward and optimizer step through the wrapper, compared with the averaged local gradients."""
    session = the_session()
    assert session.wrapped is not None and session.optimizer is not None
    session.calls.clear()
    put_back(session.started)
    this_rank.set_place(f"step {step}: zero_grad")
    session.optimizer.zero_grad()
    clear_gradients(session.module)
    assert session.wrapper is not None
    with recorded(session.module, session.wrapper, session.optimizer) as recorder:
        loss = compute_loss(
            session.recipe, session.wrapped, session.batch, step=step, seed=seed_of(session, step), place="DDP "
        )
        this_rank.set_place(f"step {step}: DDP backward")
        loss.total.backward()
        del loss
        this_rank.set_place(f"step {step}: DDP comparison")
        owners = {name: p for name, p in named_parameters(session.module).items() if p.requires_grad}
        lossy = max(_hook_precisions(session), default=0.0)
        floor = scales({name: t for name, t in session.averaged.items() if t is not None}) if lossy else {}
        differences = tuple(
            _against_local(session, name, None if p.grad is None else dense(p.grad), lossy, floor.get(name, 0.0))
            for name, p in owners.items()
        )
        gradients = {name: 0 if p.grad is None else fingerprint(dense(p.grad)) for name, p in owners.items()}
        computed_with = fingerprints(session.module.named_parameters())
        this_rank.set_place(f"step {step}: optimizer")
        session.optimizer.step()
    held = fingerprints(plain_state(session.module))
    return DdpStepEvidence(
        rank=session.rank,
        step=step,
        gradients=gradients,
        parameters=fingerprints(session.module.named_parameters()),
        computed_with=computed_with,
        buffers=fingerprints(session.module.named_buffers()),
        state={name: value for name, value in held.items() if name in session.own_state},
        late_state={name: value for name, value in held.items() if name not in session.own_state},
        optimizer=_optimizer_state(session),
        against_local=differences,
        wrapper_calls=session.calls.get("wrapper", 0),
        inner_calls=session.calls.get("inner", 0),
        events=tuple(recorder.events),
        before=recorder.values,
    )


_EXACT_HOOKS = ("allreduce_hook", "noop_hook")  # of torch.distributed.algorithms.ddp_comm_hooks


def _against_local(session: Session, name: str, got: torch.Tensor | None, lossy: float, floor: float) -> Difference:
    """One gradient against the average of the ranks' own.

    Args:
        session: Of this rank.
        name: Of the parameter.
        got: What the wrapper left.
        lossy: What a communication hook loses; 0 where there is none.
        floor: Of the scale, where there is one: a gradient that is nothing but rounding is rounded away with impunity.
    """
    want = session.averaged.get(name)
    if got is None and want is None:
        return Difference(name, 0.0, 0.0)
    if got is None and want is not None and not bool(want.count_nonzero()):
        return Difference(name, 0.0, 0.0)
    if want is None and got is not None:
        want = torch.zeros_like(got)  # under find_unused_parameters, what no rank used may come back as zeros
    assert want is not None
    tolerance = (8 + session.world_size) * max(eps_of(want.dtype), lossy)
    scale = max(session.scale.get(name) or norm(want), floor)
    return difference(name, got, want, scale=scale, tolerance=tolerance)


def _hook_precisions(session: Session) -> list[float]:
    """Machine eps of what communication hooks may compress to; 0.1 for those that lose more on purpose (PowerSGD)."""
    found = []
    for hook, _state in getattr(session.wrapper, "_comm_hooks", ()):
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
        if any(word in f"{module}.{name}" for word in ("powerSGD", "quantization", "post_localSGD")):
            found.append(0.1)
        elif name not in _EXACT_HOOKS:
            found.append(eps_of(torch.bfloat16))
    return found


def _optimizer_state(session: Session) -> dict[str, int]:
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
