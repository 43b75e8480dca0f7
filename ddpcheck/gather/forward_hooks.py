"""Hooks around the forward pass of any module, also of one that TorchScript has compiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def before_forward(module: nn.Module, hook: Callable[..., None], *, with_kwargs: bool = False) -> RemovableHandle:
    """Have `hook` called before each forward pass of `module`, as `nn.Module.register_forward_pre_hook` does.

    `torch.jit.ScriptModule` has put a method that raises in the place of that one (torch/jit/_script.py), and yet calls
    what is registered, where Python calls it; compiled code calls no hook of the modules in it.
    """
    return nn.Module.register_forward_pre_hook(module, hook, with_kwargs=with_kwargs)


def after_forward(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Have `hook` called after each forward pass of `module`; for the rest, as `before_forward`."""
    return nn.Module.register_forward_hook(module, hook)


class OutsideOfCompiledCode:
    """A hook on a part of a model, which code that `torch.compile` makes of the model does not call.

    Modules are followed from some step on, and may be compiled again after that. torch traces this class, and finds
    that nothing is done: the code stays one graph, also with `fullgraph=True`.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._hook(*arguments)


class OutsideOfTraining(OutsideOfCompiledCode):
    """Such a hook, which is not called in training mode with gradients either."""

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if module.training and torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
            self._hook(module, *arguments)


def scripting_in(
    around: Callable[[object], contextlib.AbstractContextManager[None]], script: Callable[..., Any]
) -> Callable[..., Any]:
    """`torch.jit.script`, which compiles code in the context `around(code)`."""

    @functools.wraps(script)
    def scripted(code: Any, *arguments: Any, **named: Any) -> Any:
        if not arguments:  # names in a class are those of the frame that calls, which is one more away
            named["_frames_up"] = named.get("_frames_up", 0) + 1
        with around(code):
            return script(code, *arguments, **named)

    return scripted


@contextlib.contextmanager
def hooks_put_aside(code: object) -> Iterator[None]:
    """Take hooks of ddpcheck off a module while TorchScript compiles it, which would compile its hooks as well."""
    parts = code.modules() if isinstance(code, nn.Module) else ()
    tables = [table for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    ours = [(t, key, hook) for t in tables for key, hook in t.items() if isinstance(hook, OutsideOfCompiledCode)]
    for table, key, _ in ours:
        del table[key]
    try:
        yield
    finally:
        for table, key, hook in ours:
            table[key] = hook
