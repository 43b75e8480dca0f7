"""User code that changes gradients: hooks, by registration line, and custom autograd Functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.modules import GradientHook
from ddpcheck.findings.source_lines import code_of, defined_at, is_user_file, user_location
from ddpcheck.gather.patching import CALLER, patched

_REGISTRARS: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "register_hook", "a tensor hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "a post-accumulate hook"),
    (nn.Module, "register_full_backward_hook", "a backward hook"),
    (nn.Module, "register_full_backward_pre_hook", "a backward pre-hook"),
    (nn.Module, "register_backward_hook", "a backward hook"),
)

_hooks_by_line: dict[str, GradientHook] = {}


def record_hooks() -> None:
    """Record, until the process ends, where user code registers gradient hooks."""
    for owner, name, kind in _REGISTRARS:
        patched(owner, name, functools.partial(_record_registration, kind))


def _record_registration(kind: str, _owner: Any, hook: Any, *_args: Any, **_kwargs: Any) -> None:
    caller = sys._getframe(CALLER)
    if is_user_file(caller.f_code.co_filename):  # neither DDP's nor ddpcheck's hooks
        location = user_location(caller)
        _hooks_by_line.setdefault(str(location), GradientHook(f"{kind} ({_hook_name(hook)})", location))


def _hook_name(hook: Any) -> str:
    inner = hook.func if isinstance(hook, functools.partial) else hook
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__))
    return name.rpartition("<locals>.")[2].replace("<lambda>", "a lambda")


def recorded_hooks() -> tuple[GradientHook, ...]:
    """Return the hooks registered so far, one per registration line."""
    return tuple(_hooks_by_line.values())


def hooks_on(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield gradient hooks of leaf tensors; nothing if torch lacks the private attributes."""
    for tensor in tensors:
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield from (getattr(tensor, attribute, None) or {}).values()


def user_functions(node_names: Collection[str]) -> tuple[GradientHook, ...]:
    """Describe user-defined autograd Functions with a node in `node_names` (class names of nodes).

    A `backward` can change gradients like a hook, so the result has a `GradientHook` with the line of each `backward`.
    """
    hooks = []
    for cls in subclasses_of(torch.autograd.Function):
        code = code_of(cls.backward)
        if f"{cls.__name__}Backward" in node_names and code is not None and is_user_file(code.co_filename):
            hooks.append(GradientHook(f"the backward of {cls.__qualname__}", defined_at(cls.backward)))
    return tuple(hooks)


def subclasses_of(cls: type) -> Iterator[Any]:
    """Yield all direct and indirect subclasses of `cls`."""
    pending: list[type] = list(type.__subclasses__(cls))
    while pending:
        current = pending.pop()
        yield current
        pending += type.__subclasses__(current)
