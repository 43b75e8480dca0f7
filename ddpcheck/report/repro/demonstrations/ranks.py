"""Ranks differ where they should be equal, or are equal where they should differ."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.gather.autograd.autograd_graph import unregistered_state
from ddpcheck.gather.steps.training_step import model_seed, step_seed
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors
from ddpcheck.report.repro.demonstrations.harness import *


def apart_before(recipe: Any, facts: Callable[[Any], dict[str, Any]]) -> int:
    """Build the model on every rank, run the steps where there are any, and compare, all without DDP."""
    seed_all(model_seed(SEED))
    net = recipe.model().to(DEVICE)
    for step in range(STEPS):
        local_loss(recipe, net, step).backward()
    return tell(differences(facts(net)), f"after {STEPS} steps without DDP" if STEPS else "before wrapping")


def apart(recipe: Any, facts: Callable[[Any, Any], dict[str, Any]]) -> int:
    """Wrap the model on every rank, and compare after every step; before the first where there is none."""
    group = side_group()
    ddp, optim = wrapped(recipe, built(recipe))
    if not STEPS:
        return tell(differences(facts(ddp, optim), group), "after wrapping")
    faults = 0
    for step in range(STEPS):
        optim.zero_grad()
        local_loss(recipe, ddp, step).backward()
        optim.step()
        faults += tell(differences(facts(ddp, optim), group), f"after step {step}")
    return 1 if faults else 0


# What is compared


def layout(module: Any) -> dict[str, Any]:
    """What DDP takes to be the same of every parameter and buffer."""
    parameters = [*module.named_parameters(remove_duplicate=False)]
    first: dict[Any, str] = {}
    for name, p in parameters:
        first.setdefault(p, name)
    numbers = {p: number for number, p in enumerate(first)}
    found = {}
    for name, p in parameters:
        found[name] = f"number {numbers[p]}, {tuple(p.shape)}, {p.dtype}, strides {p.stride()}, on {p.device.type}"
        found[name] += f", requires_grad={p.requires_grad}" + (f", is {first[p]}" if first[p] != name else "")
    for number, (name, b) in enumerate(module.named_buffers()):
        found[name] = f"buffer number {number}, {tuple(b.shape)}, {b.dtype}"
    return found


def module_classes(module: Any) -> dict[str, Any]:
    """The class of every module, its settings, and whether it is in training mode."""
    named = module.named_modules()
    return {n or "the model": f"{type(m).__name__}({m.extra_repr()}) training={m.training}" for n, m in named}


def wrapper_options(module: nn.Module, optim: Any) -> dict[str, Any]:
    """The options of the wrapper."""
    names = ["find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view"]
    found = {name: getattr(module, name) for name in (*names, "bucket_bytes_cap") if hasattr(module, name)}
    hooks = [hook.__qualname__ for hook, _ in getattr(module, "_comm_hooks", ())]
    return {**found, "communication hook": ", ".join(hooks) or "none"}


def optimizer_options(module: nn.Module, optim: Any) -> dict[str, Any]:
    """The options of the optimizer, by group of parameters."""
    found: dict[str, Any] = {"class": type(optim).__name__}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, group in enumerate(optim.param_groups):
        held = [names.get(p, "one that is not the model's") for p in group["params"]]
        found[f"parameters of group {index}"] = ", ".join(held)
        found.update({f"{key} of group {index}": group[key] for key in group if key != "params"})
    return found


def buffer_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    """The values of buffers."""
    return dict(module.named_buffers())


def parameter_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    """The values of parameters."""
    return dict(module.named_parameters())


def training_state(module: nn.Module, optim: Any) -> dict[str, Any]:
    """Parameters, buffers, and what the optimizer keeps."""
    found = dict(module.state_dict())
    for index, kept in enumerate(optim.state.values()):
        found.update({f"{key} of the optimizer, {index}": kept[key] for key in kept})
    return found


def unregistered_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    """Tensors that are attributes of a module, neither parameter nor buffer, and the numbers that the finding names."""
    inner = getattr(module, "module", module)
    found: dict[str, Any] = dict(unregistered_state(inner))
    for name in SUBJECTS:
        with contextlib.suppress(AttributeError):
            value = operator.attrgetter(name)(inner)
            found.update({name: value} if isinstance(value, (int, float, complex, str)) else {})
    return found


# Gradients


def gradients_apart(recipe: Any) -> int:
    """Train, compare the gradients of the ranks bit by bit, and count the forward passes under no_sync."""
    group = side_group()
    calls, faults = 0, 0
    synchronised: list[bool] = []

    def counted(no_sync: Callable[[], Any]) -> Callable[[], Any]:
        def count() -> Any:
            nonlocal calls
            calls += 1
            return no_sync()

        return count

    try:
        ddp, optim = wrapped(recipe, built(recipe))
        for wrapper in [m for m in ddp.modules() if isinstance(m, DistributedDataParallel)]:
            vars(wrapper)["no_sync"] = counted(wrapper.no_sync)
            wrapper.register_forward_pre_hook(lambda m, given: synchronised.append(m.require_backward_grad_sync))
        for step in training_steps(recipe, ddp, optim):
            faults += tell(differences(named_gradients(ddp), group), f"gradients in step {step}")
    except RuntimeError as error:
        say(f"DDP says: {in_short(error)}")
        return 1
    if calls:
        passes = f"{synchronised.count(False)} of {len(synchronised)} forward passes under it"
        say(f"no_sync called {calls} times, {passes}")
    return 1 if faults or (calls and all(synchronised)) else 0


# Samples and random numbers


def samples_in(data: Any) -> Counter[tuple[str, ...]]:
    """The rows along dim 0 of what is in a batch, and how often each is there."""
    columns = [x for x in tree_leaves(data, is_leaf=are_words) if are_words(x) or getattr(x, "ndim", False)]
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
            f"step {step}: {again} of its {sum(own.values())} samples are on another rank too;"
            f" {missing} of the {sum(whole.values())} samples of the global batch are on no rank"
        )
        faults += again + missing
    return 1 if faults else 0


class Recorder(TorchDispatchMode):
    """Keeps the random numbers that are drawn, and the numbers that are reduced."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[tuple[str, list[float]]] = []
        self.sent: list[list[float]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is sent, call the operation, and note what it has drawn."""
        if "reduce" in str(function) and "c10d" in function.namespace:
            self.sent += [x.detach().flatten().tolist() for x in tree_tensors(args[0])]
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
        loss_of(recipe, net, data)
    return recorder


def shared_draws(recipe: Any) -> int:
    """Seed every rank with a number of its own, and compare what the ranks draw."""
    everyone = gathered(recorded(recipe, 1000 + RANK).drawn)
    calls = [*zip(*everyone, strict=False)]
    shared = [call[0][0] for call in calls if all(own == call[0] for own in call)]
    say(f"draws {len(calls)} times, and the same numbers as every other rank {len(shared)} times {shared[:1]}")
    return 1 if shared else 0


def packing(recipe: Any) -> int:
    """Give every rank the samples of rank 0, and compare what the ranks send."""
    faults = 0
    everyone = gathered(recorded(recipe, step_seed(SEED, 0, 0)).sent)
    for sent in zip(*everyone, strict=False):
        alike = all(sorted(numbers) == sorted(sent[0]) for numbers in sent)
        if alike and any(numbers != sent[0] for numbers in sent):
            say(f"packs in an order of its own: {', '.join(f'{number:.6g}' for number in sent[RANK][:6])}")
            faults += 1
    if not faults:
        say("packs as the others do")
    return 1 if faults else 0
