"""Detect how program hooks change a rank's own gradients before the average.

A linear hook commutes with the average: a mask, factor or projection that all ranks share does no harm. So only changes
that can be compared between ranks are recorded: one factor for all elements, zeroed elements, and values clamped at a
limit (not linear).
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
from ddpcheck.record.recording import UnpickledHook

_MOST_ELEMENTS = 1 << 24
_FEWEST = 4  # elements needed to classify a change
_SAME = 1e-4  # relative tolerance
_REGISTRATIONS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}


class HookedGradients:
    """Recorder of gradients before and after the hooks that the program registered."""

    def __init__(self) -> None:
        # change of the last gradient by hooks, by parameter name; absent if unchanged
        self.changed: dict[str, HookedGradient] = {}
        # factor that backward hooks apply to incoming or outgoing gradients, by module name; other changes may be per
        # sample, and so equal in any batch
        self.factors: dict[str, float] = {}
        self.location: Location | None = None  # line that defines the first of these hooks
        self._before: dict[str, torch.Tensor] = {}

    def attach(self, name: str, leaf: torch.Tensor, accumulated: Callable[[str], object]) -> list[Any]:
        """Register hooks around the program's hooks, to compare gradients; return the handles.

        `accumulated(name)` is called after hooks that may have changed `.grad`. The lists of hooks are private to
        torch. If a torch version lacks the lists, nothing is registered.
        """
        handles: list[Any] = []
        if not leaf.requires_grad or not leaf.is_leaf:  # temporarily frozen
            return handles
        if self._has_hooks(leaf, "_backward_hooks"):
            handles.append(leaf.register_hook(UnpickledHook(functools.partial(self._keep, name))))
            _call_first(leaf._backward_hooks, handles[-1])
        if self._has_hooks(leaf, "_post_accumulate_grad_hooks"):
            first = UnpickledHook(lambda parameter: self._keep(name, parameter.grad))
            last = UnpickledHook(functools.partial(self._after_accumulation, name, accumulated))
            handles += [leaf.register_post_accumulate_grad_hook(hook) for hook in (first, last)]
            _call_first(leaf._post_accumulate_grad_hooks, handles[-2])
        return handles

    def attach_to_module(self, name: str, module: nn.Module) -> list[Any]:
        """Register hooks around a module's full backward hooks, to compare gradients; return the handles."""
        handles: list[Any] = []
        for attribute, registration in _REGISTRATIONS.items():
            if getattr(module, "_is_full_backward_hook", None) is False or not self._has_hooks(module, attribute):
                continue
            for note in (self._keep_all, self._compare_all):
                hook = UnpickledHook(lambda _module, grads, *_more, note=note: note(name, grads))
                handles.append(getattr(module, registration)(hook))
            _call_first(getattr(module, attribute), handles[-2])
        return handles

    def _keep_all(self, name: str, gradients: tuple[Any, ...]) -> None:
        for number, gradient in enumerate(gradients):
            self._keep(f"{name} {number}", gradient)

    def _compare_all(self, name: str, gradients: tuple[Any, ...]) -> None:
        for number, gradient in enumerate(gradients):
            before = self._before.pop(f"{name} {number}", None)
            if before is not None and before.shape == getattr(gradient, "shape", None):
                change = change_of(before, gradient.detach())
                if change.kind == "scaled" and change.number != 1.0:
                    self.factors[name] = change.number

    def _has_hooks(self, leaf: Any, attribute: str) -> bool:
        registered = (getattr(leaf, attribute, None) or {}).values()
        hooks = [hook for hook in registered if not isinstance(hook, UnpickledHook)]
        lines = [line for line in map(defined_at, hooks) if line is not None and is_user_file(line.path)]
        self.location = self.location or next(iter(lines), None)
        return bool(hooks)

    def _keep(self, name: str, gradient: Any) -> None:
        plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided and gradient.is_floating_point()
        if plain and gradient.numel() <= _MOST_ELEMENTS:
            self._before[name] = gradient.detach().clone()

    def _after_accumulation(self, name: str, accumulated: Callable[[str], object], parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.arrived(name, parameter.grad)
            accumulated(name)

    def arrived(self, name: str, gradient: torch.Tensor) -> None:
        """Record how the program's hooks changed a gradient; called after the last hook."""
        before = self._before.pop(name, None)
        if before is not None and before.shape == gradient.shape and not torch.equal(before, gradient):
            self.changed[name] = change_of(before, gradient.detach())


def _call_first(hooks: Any, handle: Any) -> None:
    """Move the hook of `handle` to the front; torch calls hooks in dictionary order."""
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)


def change_of(before: torch.Tensor, after: torch.Tensor) -> HookedGradient:
    """Classify how hooks changed a gradient: scaled, masked, limited, or not comparable across ranks."""
    same = max(_SAME, 8 * torch.finfo(before.dtype).eps)
    old, new = before.flatten().double(), after.flatten().double()
    finite = old.isfinite() & new.isfinite() & (old.abs() > 1e-30)
    are_finite = bool(finite.all())
    old, new = old[finite], new[finite]
    if len(old) < _FEWEST:
        return HookedGradient()
    zero = new == 0
    factors = (new / old)[~zero]
    if len(factors) and float(factors.max() - factors.min()) <= same * float(factors.abs().mean()):
        if not bool(zero.any()):
            return HookedGradient("scaled", float(factors.mean()))
        return HookedGradient("masked", float(factors.mean()), fingerprint(zero)) if are_finite else HookedGradient()
    cut = (new - old).abs() > same * old.abs()
    sizes, limits = old[cut].abs(), new[cut].abs()
    if len(limits) >= _FEWEST and bool((new[cut] * old[cut] > 0).all()) and bool((limits < sizes).all()):
        limit = float(limits.mean())
        if float(limits.max() - limits.min()) <= same * limit < float(sizes.max() - sizes.min()):
            return HookedGradient("limited", limit)
    return HookedGradient()
