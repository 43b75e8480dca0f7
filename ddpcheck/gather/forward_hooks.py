"""Forward hooks for any module, including TorchScript-compiled modules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def before_forward(module: nn.Module, hook: Callable[..., None], *, with_kwargs: bool = False) -> RemovableHandle:
    """Register a forward pre-hook on `module`, like `nn.Module.register_forward_pre_hook`.

    `torch.jit.ScriptModule` overrides the method with one that raises (torch/jit/_script.py), but still runs registered
    hooks when called from Python. Compiled code skips the hooks of its submodules.
    """
    return nn.Module.register_forward_pre_hook(module, hook, with_kwargs=with_kwargs)


def after_forward(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Register a forward hook on `module`, even for a `ScriptModule` (see `before_forward`)."""
    return nn.Module.register_forward_hook(module, hook)


class OutsideOfCompiledCode:
    """Module hook that is skipped inside code compiled by `torch.compile`.

    If torch compiles a model that has this hook, torch traces `__call__` and finds nothing to do: no graph break, even
    with `fullgraph=True`.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._hook(*arguments)


class OutsideOfTraining(OutsideOfCompiledCode):
    """Module hook skipped in compiled code, and in training mode with gradients enabled."""

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if module.training and torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
            self._hook(module, *arguments)


def scripting_in(
    around: Callable[[object], contextlib.AbstractContextManager[None]], script: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap `script` (`torch.jit.script`) to compile each `code` inside the context `around(code)`."""

    @functools.wraps(script)
    def scripted(code: Any, *arguments: Any, **named: Any) -> Any:
        if not arguments:  # names are resolved in the calling frame; this wrapper adds one
            named["_frames_up"] = named.get("_frames_up", 0) + 1
        with around(code):
            return script(code, *arguments, **named)

    return scripted


@contextlib.contextmanager
def without_own_hooks(code: object) -> Iterator[None]:
    """Remove ddpcheck's hooks from module `code` in the block, for compilation by TorchScript."""
    parts = code.modules() if isinstance(code, nn.Module) else ()
    tables = [table for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    own_hooks = [(t, key, hook) for t in tables for key, hook in t.items() if isinstance(hook, OutsideOfCompiledCode)]
    for table, key, _ in own_hooks:
        del table[key]
    try:
        yield
    finally:
        for table, key, hook in own_hooks:
            table[key] = hook
