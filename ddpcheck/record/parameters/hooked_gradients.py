"""What hooks of the program make of a rank's own gradients, before they are averaged, as far as numbers tell it.

The average of what a linear hook leaves is what it would leave of the average: a mask, a factor or a projection that
all ranks share does no harm. So only that is told of which it can be known whether ranks share it: one factor for all
elements, zeros in the place of some, and values that are cut off at a limit, which is not linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.loop import HookedGradient
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import defined_at, is_user_file
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.record.module_hooks import UnpickledHook

_MOST_ELEMENTS = 1 << 24
_FEWEST = 4  # elements that tell one kind of change from another
_SAME = 1e-4  # relative
_REGISTERS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}


class HookedGradients:
    """Looks at the gradients of parameters that have hooks of the program, before these are called and after that.

    Attributes:
        changed: By name of a parameter, what its hooks have made of the last gradient; none where it is as it was.
        factors: By name of a module, by what its backward hooks have multiplied what backward brings to it, or takes on
            from it. What else they do to it may be for each sample, and so the same in any batch.
        location: The line at which the first of these hooks is defined.
    """

    def __init__(self) -> None:
        self.changed: dict[str, HookedGradient] = {}
        self.factors: dict[str, float] = {}
        self.location: Location | None = None
        self._before: dict[str, torch.Tensor] = {}

    def attach(self, name: str, leaf: torch.Tensor, accumulated: Callable[[str], object]) -> list[Any]:
        """Hang hooks before those of the program, and after them; returns handles.

        `accumulated` is called where hooks may have changed `.grad`. Private to torch: nothing, where this torch does
        not say which hooks there are.
        """
        handles: list[Any] = []
        if not leaf.requires_grad or not leaf.is_leaf:  # frozen for a while
            return handles
        if self._has_hooks(leaf, "_backward_hooks"):
            handles.append(leaf.register_hook(UnpickledHook(functools.partial(self._keep, name))))
            _call_first(leaf._backward_hooks, handles[-1])
        if self._has_hooks(leaf, "_post_accumulate_grad_hooks"):
            first = UnpickledHook(lambda parameter: self._keep(name, parameter.grad))
            last = UnpickledHook(functools.partial(self._accumulated, name, accumulated))
            handles += [leaf.register_post_accumulate_grad_hook(one) for one in (first, last)]
            _call_first(leaf._post_accumulate_grad_hooks, handles[-2])
        return handles

    def attach_to_module(self, name: str, module: nn.Module) -> list[Any]:
        """Likewise, to a module with full backward hooks of the program, before its forward pass."""
        handles: list[Any] = []
        for held in ("_backward_hooks", "_backward_pre_hooks"):
            if getattr(module, "_is_full_backward_hook", None) is False or not self._has_hooks(module, held):
                continue
            first, last = (
                UnpickledHook(lambda _module, given, *_more, note=note: note(name, given))
                for note in (self._keep_all, self._arrived_all)
            )
            register: Any = getattr(module, _REGISTERS[held])
            handles += [register(one) for one in (first, last)]
            _call_first(getattr(module, held), handles[-2])
        return handles

    def _keep_all(self, name: str, gradients: tuple[Any, ...]) -> None:
        for number, gradient in enumerate(gradients):
            self._keep(f"{name} {number}", gradient)

    def _arrived_all(self, name: str, gradients: tuple[Any, ...]) -> None:
        for number, gradient in enumerate(gradients):
            before = self._before.pop(f"{name} {number}", None)
            if before is not None and before.shape == getattr(gradient, "shape", None):
                change = change_of(before.flatten(), gradient.detach().flatten())
                if change.kind == "scaled" and change.number != 1.0:
                    self.factors[name] = change.number

    def _has_hooks(self, leaf: Any, held: str) -> bool:
        """Whether there are such of the program."""
        hooks = [one for one in (getattr(leaf, held, None) or {}).values() if not isinstance(one, UnpickledHook)]
        where = [one for one in map(defined_at, hooks) if one is not None and is_user_file(one.path)]
        self.location = self.location or next(iter(where), None)
        return bool(hooks)

    def _keep(self, name: str, gradient: Any) -> None:
        plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided and gradient.is_floating_point()
        if plain and gradient.numel() <= _MOST_ELEMENTS:
            self._before[name] = gradient.detach().clone()

    def _accumulated(self, name: str, accumulated: Callable[[str], object], parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.arrived(name, parameter.grad)
            accumulated(name)

    def arrived(self, name: str, gradient: torch.Tensor) -> None:
        """The hooks that were to be called have been."""
        before = self._before.pop(name, None)
        if before is not None and before.shape == gradient.shape and not torch.equal(before, gradient):
            self.changed[name] = change_of(before.flatten(), gradient.detach().flatten())


def _call_first(hooks: Any, handle: Any) -> None:
    """Torch calls them in the order in which they came into this dictionary."""
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)


def change_of(before: torch.Tensor, after: torch.Tensor) -> HookedGradient:
    """How elements have been changed, if it is in one of the ways of which ranks can be compared."""
    same = max(_SAME, 8 * torch.finfo(before.dtype).eps)
    given, left = before.double(), after.double()
    known = given.isfinite() & left.isfinite() & (given.abs() > 1e-30)
    whole = bool(known.all())
    given, left = given[known], left[known]
    if len(given) < _FEWEST:
        return HookedGradient()
    zero = left == 0
    factors = (left / given)[~zero]
    if len(factors) and float(factors.max() - factors.min()) <= same * float(factors.abs().mean()):
        if not bool(zero.any()):
            return HookedGradient("scaled", float(factors.mean()))
        return HookedGradient("masked", float(factors.mean()), fingerprint(zero)) if whole else HookedGradient()
    cut = (left - given).abs() > same * given.abs()
    sizes, limits = given[cut].abs(), left[cut].abs()
    if len(limits) >= _FEWEST and bool((left[cut] * given[cut] > 0).all()) and bool((limits < sizes).all()):
        limit = float(limits.mean())
        if float(limits.max() - limits.min()) <= same * limit < float(sizes.max() - sizes.min()):
            return HookedGradient("limited", limit)
    return HookedGradient()
