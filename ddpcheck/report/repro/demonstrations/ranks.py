"""Ranks differ where they should be equal, or are equal where they should differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.report.repro.demonstrations.harness import (
    built,
    differences,
    gathered,
    global_batch,
    in_short,
    leaves,
    local_batch,
    local_loss,
    say,
    seed_all,
    side_group,
    tell,
    training_steps,
    wrapped,
)
from ddpcheck.report.repro.demonstrations.settings import (
    RANK,
    STEP_SEEDS,
    STEPS,
)


def apart_before(recipe: Any, facts: Callable[[nn.Module], dict[str, Any]]) -> int:
    """Build the model on every rank, and compare before DDP's first collective."""
    return tell(differences(facts(built(recipe))), "before wrapping")


def apart_wrapped(
    recipe: Any, facts: Callable[[nn.Module, Any], dict[str, Any]]
) -> int:
    """Wrap the model on every rank, and compare before the first step."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    return tell(differences(facts(ddp, optim), group), "after wrapping")


def apart_trained(
    recipe: Any, facts: Callable[[nn.Module, Any], dict[str, Any]]
) -> int:
    """Train, and compare between ranks after every step."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    faults = 0
    for step in range(STEPS):
        optim.zero_grad()
        local_loss(recipe, ddp, step).backward()
        optim.step()
        faults += tell(differences(facts(ddp, optim), group), f"after step {step}")
    return 1 if faults else 0


def every_gradient(module: nn.Module) -> dict[str, Any]:
    """The gradients, None where there is none."""
    return {
        name: None if p.grad is None else p.grad.detach().to_dense().cpu()
        for name, p in module.named_parameters()
    }


def gradients_apart(recipe: Any) -> int:
    """Train, and compare the gradients of the ranks, bit by bit."""
    group = side_group()
    faults = 0
    try:
        ddp, optim = wrapped(recipe, built(recipe))
        for step in training_steps(recipe, ddp, optim):
            apart = differences(every_gradient(ddp), group)
            faults += tell(apart, f"gradients in step {step}")
    except RuntimeError as error:
        say(f"DDP says: {in_short(error)}")
        faults += 1
    return 1 if faults else 0


def no_sync(recipe: Any) -> int:
    """Train, and count the calls of no_sync and the forward passes under it."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    wrapper = next(m for m in ddp.modules() if isinstance(m, DistributedDataParallel))
    original = wrapper.no_sync
    calls = 0
    synchronised: list[bool] = []

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return original()

    wrapper.no_sync = counted  # type: ignore[method-assign]
    wrapper.register_forward_pre_hook(
        lambda module, given: synchronised.append(module.require_backward_grad_sync)
    )
    faults = 0
    for step in training_steps(recipe, ddp, optim):
        apart = differences(every_gradient(ddp), group)
        faults += tell(apart, f"gradients in step {step}")
    say(
        f"no_sync called {calls} times, {synchronised.count(False)} of"
        f" {len(synchronised)} forward passes under it"
    )
    return 1 if faults or (calls and all(synchronised)) else 0


def samples_in(data: Any) -> Counter[tuple[str, ...]]:
    """The rows along dim 0 of what is in a batch, and how often each is there."""
    columns = [
        x for x in leaves(data) if isinstance(x, list) or getattr(x, "ndim", False)
    ]
    columns = [x for x in columns if len(x) == len(columns[0])]
    columns = [x.tolist() if hasattr(x, "tolist") else x for x in columns]
    return Counter(tuple(map(str, row)) for row in zip(*columns, strict=True))


def shards(recipe: Any) -> int:
    """Compare what the ranks train on in a step with each other, and with the whole."""
    faults = 0
    for step in range(STEPS):
        whole = samples_in(global_batch(recipe, step))
        everyone = gathered(samples_in(local_batch(recipe, step)))
        own = everyone[RANK]
        held = sum(everyone, Counter[tuple[str, ...]]())
        again = sum(held[row] > whole[row] for row in own)
        missing = 0 if held - whole and not again else sum((whole - held).values())
        say(
            f"step {step}: {again} of its {sum(own.values())} samples are on another"
            f" rank too; {missing} of the {sum(whole.values())} samples of the global"
            " batch are on no rank"
        )
        faults += again + missing
    return 1 if faults else 0


class Recorder(TorchDispatchMode):
    """Keeps the random numbers that are drawn, and the numbers that are reduced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[tuple[str, list[float]]] = []
        self.sent: list[list[float]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note what is sent, call the operation, and note what it has drawn."""
        if "reduce" in str(function) and "c10d" in function.namespace:
            tensors = [x for x in leaves(args[0]) if isinstance(x, torch.Tensor)]
            self.sent += [x.detach().flatten().tolist() for x in tensors]
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            first = result if isinstance(result, torch.Tensor) else result[0]
            if first.numel() > 1:
                values = first.detach().flatten().tolist()
                self.drawn.append((function.overloadpacket.__name__, values))
        return result


def recorded(recipe: Any, seed: int) -> Recorder:
    """Record the draws and reductions of a forward pass with the samples of rank 0."""
    net = built(recipe)
    data = gathered(local_batch(recipe, 0))[0]
    seed_all(seed)
    recorder = Recorder()
    with recorder:
        recipe.loss(net, data)
    return recorder


def shared_draws(recipe: Any) -> int:
    """Seed every rank with a number of its own, and compare what the ranks draw."""
    everyone = gathered(recorded(recipe, 1000 + RANK).drawn)
    calls = [*zip(*everyone, strict=False)]
    shared = [call[0][0] for call in calls if all(own == call[0] for own in call)]
    say(
        f"draws {len(calls)} times, and the same numbers as every other"
        f" rank {len(shared)} times {shared[:1]}"
    )
    return 1 if shared else 0


def packing(recipe: Any) -> int:
    """Give every rank the samples of rank 0, and compare what the ranks send."""
    faults = 0
    everyone = gathered(recorded(recipe, STEP_SEEDS[0][0]).sent)
    for sent in zip(*everyone, strict=False):
        alike = all(sorted(numbers) == sorted(sent[0]) for numbers in sent)
        if alike and any(numbers != sent[0] for numbers in sent):
            numbers = ", ".join(f"{number:.6g}" for number in sent[RANK][:6])
            say(f"packs in an order of its own: {numbers}")
            faults += 1
    if not faults:
        say("packs as the others do")
    return 1 if faults else 0
