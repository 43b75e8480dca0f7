"""Whether a loss couples samples: the first activations of some samples are changed, the gradients of others compared.

The second derivative of the loss in the activations of two samples is zero where the loss is a sum over samples,
whatever it is divided by. Only what the model computes is changed, no data, so that counts and masks stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ddpcheck.gather.steps.batch_coupling import axes_that_grow
from ddpcheck.recipe.pytree import tree_tensors

_SMALL_CHANGE = 1e-2  # relative
_MOST_ELEMENTS = 1 << 26
_FELT = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative change of a gradient that is more than rounding


@dataclass(slots=True)
class Activation:
    """Where data first meets parameters: the result of one operation, in the order of the forward pass."""

    value: torch.Tensor  # as the forward pass goes on with it
    gradient: torch.Tensor | None = None  # that a backward pass has brought

    def arrived(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of a backward pass."""
        self.gradient = gradient.detach().clone()


class FirstActivations(TorchFunctionMode):
    """Records the first activations of a forward pass, and multiplies those that it is told to.

    `factors` are by position in the forward pass.
    """

    def __init__(self, factors: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.found: list[Activation] = []
        self._factors = factors or {}
        self._later: dict[int, Any] = {}  # what is computed from activations, kept so that no identity is used twice
        self._elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) and type(result) is not tuple:
            return result
        with torch._C.DisableTorchFunction():
            made = [tensor for tensor in tree_tensors(result) if tensor.requires_grad]
            given = list(tree_tensors([args, kwargs or {}])) if made else []
            if any(id(tensor) in self._later for tensor in given):
                self._later.update((id(tensor), tensor) for tensor in made)
            elif made and any(not tensor.requires_grad and tensor.dim() for tensor in given):
                first = result if isinstance(result, torch.Tensor) else result[0]
                if isinstance(first, torch.Tensor) and first.requires_grad and first.dim():
                    changed = self._first(first)
                    result = changed if first is result else (changed, *result[1:])
                    self._later.update((id(tensor), tensor) for tensor in (changed, *made))
        return result

    def _first(self, result: torch.Tensor) -> torch.Tensor:
        factor = self._factors.get(len(self.found))
        if factor is not None and factor.shape[0] == result.shape[0]:
            result = result * factor
        self._elements += result.numel()
        activation = Activation(result.detach().clone() if self._elements < _MOST_ELEMENTS else result.new_empty(0))
        result.register_hook(activation.arrived)
        self.found.append(activation)
        return result


def rows_of_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """Which rows (dim 0) of `whole` belong to the samples of `part`; None where that cannot be told.

    Samples that lie one after the other are looked for first, then several views of all samples one after the other.
    """
    if axes_that_grow(whole, part) != [0]:
        return None
    size, share = len(whole), len(part)
    for views in (1, *(views for views in range(2, 5) if size % views == 0 and share % views == 0)):
        first = whole.unflatten(0, (views, -1))[:, : share // views].flatten(0, 1)
        if torch.allclose(first, part, rtol=1e-5, atol=1e-7 * float(part.abs().max()) if part.numel() else 0.0):
            owned = torch.zeros(views, size // views, dtype=torch.bool)
            owned[:, : share // views] = True
            return owned.flatten()
    return None


def changes_for(
    whole: Sequence[Activation], part: Sequence[Activation], *, large: bool
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By position: rows of the part's samples among the first activations of the batch, and factors that change them.

    Those are `large` where they negate, so that what is chosen by them (the expert of a sample) becomes another, too.
    """
    found = {}
    generator = torch.Generator().manual_seed(0)
    for number, (full, alone) in enumerate(zip(whole, part, strict=False)):
        owned = rows_of_part(full.value, alone.value) if full.value.numel() and alone.value.numel() else None
        if owned is None or bool(owned.all()):
            continue
        factor = torch.ones(full.value.shape, dtype=full.value.dtype)
        noise = torch.rand(factor[owned].shape, generator=generator, dtype=torch.float64) * 2 - 1
        factor[owned] = -factor[owned] if large else factor[owned] + _SMALL_CHANGE * noise.to(factor.dtype)
        found[number] = (owned, factor.to(full.value.device))
    return found


def are_felt(
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    changes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> bool | None:
    """Whether gradients of first activations are others for other samples; None where none can be compared."""
    compared = False
    for number, (owned, _) in changes.items():
        one, other = (gradients[number] if number < len(gradients) else None for gradients in (before, after))
        if one is None or other is None or one.shape != other.shape or one.dtype not in _FELT:
            continue
        others = ~owned.to(one.device)
        size = float(torch.linalg.vector_norm(one[others]))
        compared = compared or size > 0
        if float(torch.linalg.vector_norm(one[others] - other[others])) > _FELT[one.dtype] * size:
            return True
    return False if compared else None
