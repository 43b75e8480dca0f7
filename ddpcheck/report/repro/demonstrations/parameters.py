"""Parameters without gradient or training, and tensors that DDP does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpcheck.report.repro.demonstrations.harness import (
    built,
    differences,
    in_short,
    leaves,
    listed,
    local_batch,
    local_loss,
    moving,
    parameters_of,
    say,
    seed_all,
    side_group,
    training_steps,
    without_gradient,
    wrapped,
)
from ddpcheck.report.repro.demonstrations.settings import (
    RANK,
    STEP_SEEDS,
    STEPS,
)


def what_ddp_says(recipe: Any) -> int:
    """Train, and tell which parameters get no gradient and what DDP says."""
    net = built(recipe)
    missing: set[str] = set()
    said = "nothing"
    try:
        ddp, optim = wrapped(recipe, net)
        for step in training_steps(recipe, ddp, optim):
            none = set(without_gradient(ddp))
            missing = missing & none if step else none
    except Exception as error:
        said = in_short(error)
    say(f"no gradient: {listed(sorted(missing))}; DDP says: {said}")
    return 1 if missing or said != "nothing" else 0


def unused_by(recipe: Any, net: nn.Module, step: int) -> list[str]:
    """The parameters that this rank's backward pass does not reach, without DDP."""
    local_loss(recipe, net, step).backward()
    missing = without_gradient(net)
    net.zero_grad()
    return missing


def sometimes_used(recipe: Any) -> int:
    """Ask every rank by itself first, since DDP may hang; then train."""
    net = built(recipe)
    missing = {step: unused_by(recipe, net, step) for step in range(STEPS)}
    steps = [f"step {step}: {listed(names)}" for step, names in missing.items()]
    say(f"no gradient in {'; '.join(steps)}")

    said = "nothing"
    try:
        ddp, optim = wrapped(recipe, built(recipe))
        for _ in training_steps(recipe, ddp, optim):
            pass
        tolerated = ddp.find_unused_parameters and not ddp.static_graph
    except Exception as error:
        said = in_short(error)
        tolerated = False
    say(f"DDP says: {said}")
    return 0 if said == "nothing" and (tolerated or not any(missing.values())) else 1


def missing_gradient(recipe: Any) -> int:
    """Tell what autograd leaves without gradient, and what DDP then does not train."""
    net = built(recipe)
    local_loss(recipe, net, 0).backward()
    missing = without_gradient(net)

    ddp, optim = wrapped(recipe, built(recipe))
    before = {name: p.detach().clone() for name, p in parameters_of(ddp).items()}
    local_loss(recipe, ddp, 0).backward()
    optim.step()
    still = [n for n in missing if parameters_of(ddp)[n].equal(before[n])]
    say(f"p.grad is None: {listed(missing)}; DDP did not train: {listed(still)}")
    return 1 if missing else 0


def zero_gradient(recipe: Any) -> int:
    """Train, and tell which parameters never get a gradient other than zero."""
    ddp, optim = wrapped(recipe, built(recipe))
    always_zero = {name for name, p in parameters_of(ddp).items() if p.requires_grad}
    for _ in training_steps(recipe, ddp, optim):
        always_zero -= moving(ddp)
    say(f"always zero: {listed(sorted(always_zero))}")
    return 1 if always_zero else 0


def needless_search(recipe: Any) -> int:
    """Train, and count the parameters that DDP searches for and does not find."""
    ddp, optim = wrapped(recipe, built(recipe))
    unused = 0
    for _ in training_steps(recipe, ddp, optim):
        unused += len(without_gradient(ddp))
    searched = ddp.find_unused_parameters
    say(f"find_unused_parameters={searched}, unused: {unused}")
    return 1 if searched and not unused else 0


def untrained(recipe: Any) -> int:
    """Train, and tell which parameters the optimizer leaves as they are."""
    ddp, optim = wrapped(recipe, built(recipe))
    before = {name: p.detach().clone() for name, p in parameters_of(ddp).items()}
    reached = set(before)
    for _ in training_steps(recipe, ddp, optim):
        reached &= moving(ddp)
    held = {id(p) for group in optim.param_groups for p in group["params"]}
    now = parameters_of(ddp)
    still = [n for n, p in now.items() if n in reached and p.equal(before[n])]
    lacking = [n for n in still if id(now[n]) not in held]
    say(
        f"have gradients and do not move: {listed(still)};"
        f" not held by the optimizer: {listed(lacking)}"
    )
    return 1 if still else 0


def discarded(recipe: Any) -> int:
    """Train, and look at the gradients whenever zero_grad is called."""
    ddp, optim = wrapped(recipe, built(recipe))
    lost: set[str] = set()
    start: dict[str, torch.Tensor] = {}

    def watched(zero_grad: Callable[..., None]) -> Callable[..., None]:
        def zero_and_look(*args: Any, **kwargs: Any) -> None:
            there = moving(ddp)
            zero_grad(*args, **kwargs)
            gone = there - moving(ddp)
            lost.update(n for n in gone if parameters_of(ddp)[n].equal(start[n]))

        return zero_and_look

    for holder in (*ddp.modules(), optim):
        holder.zero_grad = watched(holder.zero_grad)
    for step in range(STEPS):
        start.update({n: p.detach().clone() for n, p in parameters_of(ddp).items()})
        local_loss(recipe, ddp, step).backward()
        optim.step()
        for p in ddp.parameters():
            p.grad = None
    say(f"gradients zeroed that no step has used: {listed(sorted(lost))}")
    return 1 if lost else 0


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


def unregistered(recipe: Any) -> int:
    """Find the tensors that two steps train and that DDP does not know."""
    group = side_group()
    net = built(recipe)
    ddp, _ = wrapped(recipe, net)
    known = {id(p) for p in net.parameters()}
    stray: list[dict[int, torch.Tensor]] = []
    for step in range(2):
        data = local_batch(recipe, step)
        seed_all(STEP_SEEDS[step][RANK])
        loss_value = recipe.loss(ddp, data)
        own = known | {id(x) for x in leaves(data)}
        stray.append({id(x): x for x in leaves_behind(loss_value) if id(x) not in own})
        loss_value.backward()
    kept = [x for key, x in stray[0].items() if key in stray[1]]
    shapes = sorted(str(tuple(x.shape)) for x in kept)
    sizes = sorted(float(x.grad.double().norm()) for x in kept if x.grad is not None)
    apart = differences({"gradients": sizes}, group)
    verdict = "that differ between ranks" if apart else "the same on every rank"
    said = f"gradients for {', '.join(shapes)}, {verdict}"
    say(f"outside of DDP's parameters: {said if kept else 'no stray gradients'}")
    return 1 if kept else 0
