"""One training step of a recipe, in any process: the loss, its backward pass, and the state before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpcheck.errors import TargetError
from ddpcheck.gather.compare import dense
from ddpcheck.gather.randomness import QuietRandomness, generator_states, quiet_modules, seed_everything
from ddpcheck.graph import named_parameters, unregistered_tensors
from ddpcheck.nests import iter_tensors
from ddpcheck.rank import set_place
from ddpcheck.recipe import Recipe

Gradients = dict[str, torch.Tensor]


@dataclass(slots=True)
class Loss:
    """The loss of one step, with its graph.

    Attributes:
        parts: The scalar tensors that the recipe returned.
        total: Their sum, which is what backward is called on.
        drew: Whether random numbers were drawn on the way.
    """

    parts: list[torch.Tensor]
    total: torch.Tensor
    drew: bool

    @property
    def value(self) -> float:
        """The sum as a number."""
        return float(self.total.detach())


def compute_loss(recipe: Recipe, model: nn.Module, batch: Any, *, step: int, seed: int, place: str = "") -> Loss:
    """Run the forward pass and the loss under `seed`.

    Raises:
        TargetError: The loss is no scalar tensor, no nest of them, not finite, or does not require grad.
        Exception: Whatever the user's code raises.
    """
    set_place(f"step {step}: {place}forward")
    seed_everything(seed)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    before = generator_states(device)
    result = recipe.loss(model, batch)
    drew = generator_states(device) != before
    parts = list(iter_tensors(result))
    at = f"loss(model, batch) in step {step}"
    if not parts:
        raise TargetError(f"{at} returned {type(result).__name__} without any tensor; return a scalar tensor")
    for part in parts:
        if part.numel() != 1:
            raise TargetError(
                f"{at} returned a tensor of shape {tuple(part.shape)}; reduce it to a scalar, as by .mean()"
            )
    floats = [part.reshape(()) for part in parts if part.is_floating_point()]
    if not any(part.requires_grad for part in floats):
        raise TargetError(f"{at} does not require grad: no parameter of the model reaches it; is it detached?")
    total = floats[0] if len(floats) == 1 else torch.stack([part.to(floats[0].dtype) for part in floats]).sum()
    if not bool(torch.isfinite(total)):
        raise TargetError(f"{at} is {float(total.detach())}: gradients that are not finite cannot be compared")
    return Loss(floats, total, drew)


def compute_gradients(
    recipe: Recipe, model: nn.Module, batch: Any, *, step: int, seed: int, quiet: bool = False, place: str = ""
) -> tuple[Gradients, Loss]:
    """Forward and backward from cleared gradients; returns the dense gradients that arrived, by name.

    Args:
        recipe: Supplies the loss.
        model: The bare module, whose parameters' `.grad` are cleared first.
        batch: The local or the global one.
        step: Counted from 0.
        seed: For the random numbers of the forward pass.
        quiet: Give every random operation a constant (see `QuietRandomness`).
        place: Which of the runs this is, for a reader of a hang.
    """
    clear_gradients(model)
    if quiet:
        with quiet_modules(model), QuietRandomness():
            loss = compute_loss(recipe, model, batch, step=step, seed=seed, place=place)
            set_place(f"step {step}: {place}backward")
            loss.total.backward()
    else:
        loss = compute_loss(recipe, model, batch, step=step, seed=seed, place=place)
        set_place(f"step {step}: {place}backward")
        loss.total.backward()
    return gradients_of(model), loss


def clear_gradients(model: nn.Module) -> None:
    """Set every `.grad` to None, so that what arrives can be told from what was there."""
    for parameter in model.parameters():
        parameter.grad = None


def gradients_of(model: nn.Module) -> Gradients:
    """The gradients that are there, dense, by name; not copied: the next step clears `.grad` and gets new ones."""
    return {name: dense(p.grad) for name, p in named_parameters(model).items() if p.grad is not None}


# State


@dataclass(slots=True)
class ModuleState:
    """All that a training step may change in a module: parameters, buffers, unregistered tensors, plain attributes."""

    tensors: Gradients
    plain: list[dict[str, Any]] = field(default_factory=list)

    def restore(self, module: nn.Module) -> None:
        """Put the state into `module`, which must be built alike; tensors are copied in place."""
        own = dict(_state_tensors(module))
        with torch.no_grad():
            for name, saved in self.tensors.items():
                target = own.get(name)
                if target is not None and target.shape == saved.shape:
                    target.detach().copy_(saved)
        for submodule, plain in zip(module.modules(), self.plain, strict=False):
            for key, value in plain.items():
                if key in vars(submodule):
                    object.__setattr__(submodule, key, value)


def capture_state(module: nn.Module, into: ModuleState | None = None) -> ModuleState:
    """A copy of the state of `module`; the tensors of `into`, an earlier one, are used again where they fit."""
    plain_types = (int, float, bool, str, type(None))
    old = into.tensors if into is not None else {}
    return ModuleState(
        tensors={name: _copied(tensor.detach(), old.get(name)) for name, tensor in _state_tensors(module)},
        plain=[
            {key: value for key, value in vars(submodule).items() if isinstance(value, plain_types)}
            for submodule in module.modules()
        ],
    )


def _copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None and (into.shape, into.dtype, into.stride()) == (tensor.shape, tensor.dtype, tensor.stride()):
        return into.copy_(tensor)
    return tensor.clone()


def _state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for name, tensor in unregistered_tensors(module):
        if tensor.is_leaf or not tensor.requires_grad:
            yield f"unregistered {name}", tensor


def differs_in_structure(one: nn.Module, other: nn.Module) -> bool:
    """Whether a wrapper has changed a module: other classes, or other names of parameters."""
    return [(n, type(m)) for n, m in one.named_modules()] != [(n, type(m)) for n, m in other.named_modules()] or list(
        named_parameters(one)
    ) != list(named_parameters(other))


def visible_tensors(outputs: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
    """The tensors that DDP finds in what `forward` returned, and the class of the first output in which it finds none.

    DDP looks into lists, tuples, dicts and dataclasses (torch/nn/parallel/distributed.py, `_find_tensors`).
    """
    found: list[torch.Tensor] = []
    opaque = ""
    for output in outputs:
        tensors = [tensor for tensor in iter_tensors(output) if tensor.requires_grad]
        if not any(True for _ in iter_tensors(output)) and output is not None and not opaque:
            opaque = type(output).__qualname__
        found.extend(tensors)
    return found, opaque


def hooked_parameters(module: nn.Module, *, ours: int = 0) -> tuple[str, ...]:
    """The parameters on whose gradient the user has registered a hook."""

    def count(parameter: nn.Parameter) -> int:
        hooks: Mapping[Any, Any] = parameter._backward_hooks or {}
        after: Mapping[Any, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return len(hooks) + len(after) - ours

    return tuple(name for name, parameter in module.named_parameters() if count(parameter) > 0)
