"""Training in DDP: whether it stops, what it does not train, tensors that DDP does not know, and wrong gradients."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import walk_graph
from ddpcheck.gather.steps.gradient_distance import scales
from ddpcheck.gather.steps.training_step import step_seed
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.report.repro.demonstrations.harness import *


def running(recipe: Any) -> int:
    """Train, and tell how far this rank comes; one that is stuck shows its stack."""
    place, begun = "building the model", time.monotonic()
    empty = []
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
            if not min((len(x) for x in tree_leaves(data) if getattr(x, "ndim", 0)), default=1):
                empty.append(step)
            seed_all(step_seed(SEED, step, RANK))
            loss_value = loss_of(recipe, ddp, data)
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
    say(f"finished; has no samples in steps {empty}" if empty else "finished")
    return 1 if empty else 0


def unused(recipe: Any) -> int:
    """Ask every rank by itself first, since DDP may hang; then train."""
    missing: list[list[str]] = []
    never, said, tolerated = set[str](), "nothing", False
    try:
        net = built(recipe)
        for step in range(STEPS):
            local_loss(recipe, net, step).backward()
            missing.append(without_gradient(net))
            net.zero_grad()
        say("no gradient in " + "; ".join(f"step {step}: {listed(names)}" for step, names in enumerate(missing)))
        never = set.intersection(*(set(names) for of_rank in gathered(missing) for names in of_rank))

        ddp, optim = wrapped(recipe, built(recipe))
        for _ in training_steps(recipe, ddp, optim):
            pass
        tolerated = ddp.find_unused_parameters and not ddp.static_graph
    except Exception as error:
        said = in_short(error)
    say(f"DDP says: {said}")
    return 1 if said != "nothing" or never or (any(missing) and not tolerated) else 0


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
    count = sum(len(without_gradient(ddp)) for _ in training_steps(recipe, ddp, optim))
    say(f"find_unused_parameters={ddp.find_unused_parameters}, unused: {count}")
    return 1 if ddp.find_unused_parameters and not count else 0


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
    say(f"have gradients and do not move: {listed(still)}; not held by the optimizer: {listed(lacking)}")
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


def unregistered(recipe: Any) -> int:
    """Find the tensors that two steps train and that DDP does not know."""
    group = side_group()
    net = built(recipe)
    ddp, _ = wrapped(recipe, net)
    known = {id(p) for p in net.parameters()}
    stray: list[dict[int, torch.Tensor]] = []
    for step in range(2):
        data = local_batch(recipe, step)
        seed_all(step_seed(SEED, step, RANK))
        loss_value = loss_of(recipe, ddp, data)
        own = known | {id(x) for x in tree_leaves(data)}
        stray.append({id(x): x for x in walk_graph([loss_value]).leaves if id(x) not in own})
        loss_value.backward()
    kept = [x for key, x in stray[0].items() if key in stray[1]]
    shapes = sorted(str(tuple(x.shape)) for x in kept)
    sizes = sorted(float(x.grad.double().norm()) for x in kept if x.grad is not None)
    apart = differences({"gradients": sizes}, group)
    verdict = "that differ between ranks" if apart else "the same on every rank"
    said = f"gradients for {', '.join(shapes)}, {verdict}"
    say(f"outside of DDP's parameters: {said if kept else 'no stray gradients'}")
    return 1 if kept else 0


# Gradients against those of one process, of the ranks, and of a second run


def global_gradient(recipe: Any, numbers: Callable[[nn.Module, Any], Any] | None = None, in_group: bool = False) -> int:
    """Compare DDP on shards with one process on the whole batch, which has a group of its own where `in_group`.

    `numbers` gives both the same random numbers.
    """

    def last_gradients(module: nn.Module, batch: Callable[[Any, int], Any], rank: int) -> dict[str, torch.Tensor]:
        optim = optimizer_for(recipe, module)
        for step in range(STEPS):
            optim.zero_grad()
            data = batch(recipe, step)
            seed_all(step_seed(SEED, step, 0 if numbers else rank))
            with numbers(module, data) if numbers else contextlib.nullcontext():
                loss_of(recipe, module, data).backward()
            if step + 1 < STEPS:
                optim.step()
        return named_gradients(module)

    if in_group:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = last_gradients(built(recipe), global_batch, 0)
    if in_group:
        dist.destroy_process_group()
    join()
    return judged(last_gradients(wrapped(recipe, built(recipe))[0], local_batch, RANK), alone)


def local_average(recipe: Any) -> int:
    """Train, and compare DDP's gradients with an average that is taken by hand."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    net = built(recipe)
    faults = 0
    for step in range(STEPS):
        net.load_state_dict(ddp.module.state_dict())
        for module in (net, ddp):
            module.zero_grad()
            try:
                local_loss(recipe, module, step).backward()
            except RuntimeError as error:
                say(f"DDP says: {in_short(error)}")
                return 1
        own, got, want = named_gradients(net), named_gradients(ddp), {}
        for name, x in got.items():
            everyone = gathered(own.get(name, torch.zeros_like(x)).cpu(), group)
            want[name] = torch.stack(everyone).sum(0).to(x) / WORLD_SIZE
        faults += judged(got, want)
        optim.step()
    return 1 if faults else 0


def repeat(recipe: Any) -> int:
    """Run one step twice, from the same weights and seeds, without DDP."""
    runs = []
    for _ in range(2):
        net = built(recipe)
        local_loss(recipe, net, 0).backward()
        runs.append(named_gradients(net))
    return judged(runs[1], runs[0])


def judged(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> int:
    """Say which gradient is furthest from what it should be; returns 1 where that is too far."""
    got = {name: got.get(name, 0 * x) for name, x in want.items()}
    sizes = scales(want)
    errors = {name: float((got[name] - want[name]).double().norm()) / max(sizes[name], 1e-30) for name in sizes}
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # not a number before any
    whole = torch.cat([x.double().flatten() for x in want.values()])
    ours = torch.cat([x.double().flatten() for x in got.values()])
    factor = float(ours @ whole / (whole @ whole))
    say(
        f"gradient of {worst}: relative error {errors[worst]:.2g}, allowed {TOLERANCE:g};"
        f" all gradients together: {factor:.4g} times what they should be"
    )
    return 0 if errors[worst] <= TOLERANCE else 1
