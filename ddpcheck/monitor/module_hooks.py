"""Hooks of a watch: they stay behind when a module is copied or pickled, and who holds what they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.findings.errors import FindingsError


class UnpickledHook:
    """A method as a hook that stays behind when the module it hangs on is pickled or copied."""

    def __init__(self, method: Any) -> None:
        self.method = method

    @classmethod
    def weakly(cls, method: Any) -> UnpickledHook:
        """One that does not keep the object of `method` alive, for what outlives it."""
        found = WeakMethod(method)

        def call(*args: Any, **kwargs: Any) -> None:
            alive = found()
            if alive is not None:
                alive(*args, **kwargs)

        return cls(call)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            if torch.compiler.is_compiling():
                _not_compiled(self.method, args, kwargs)
            else:  # to ask costs less than to go through what the compiler leaves alone
                self.method(*args, **kwargs)
        except FindingsError as error:  # where it was found is nothing to a reader
            raise error.with_traceback(None) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_hook, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _not_compiled(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call `method`; who compiles the wrapper, or the whole step, leaves it as it is and compiles what is around."""
    method(*args, **kwargs)


def is_ours(hook: object) -> bool:
    """Whether a hook of a module was put there to follow its rounds."""
    return isinstance(hook, UnpickledHook)


def _nothing_hook() -> Any:
    return _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def around_each_step(before: Any, after: Any) -> list[Any]:
    """Have two methods of one object called around each step of any optimizer, for as long as that object lives."""
    handles = [
        register_optimizer_step_pre_hook(UnpickledHook.weakly(before)),
        register_optimizer_step_post_hook(UnpickledHook.weakly(after)),
    ]
    for handle in handles:
        finalize(before.__self__, handle.remove).atexit = False
    return handles


_KEY = "_ddpcheck_watches"


class _Held:
    """The watches that a module holds; a copy of the module, or a pickle, has an empty tuple in their place."""

    __slots__ = ("watches",)

    def __init__(self) -> None:
        self.watches: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def hold(module: nn.Module, watch: Any) -> None:
    """Have `watch` live as long as `module`, where nobody closes it: its wrapper may go, and training go on."""
    for part in _whole(module):
        held = vars(part).get(_KEY)
        if not isinstance(held, _Held):
            held = vars(part)[_KEY] = _Held()
        held.watches = [watch, *(other for other in held.watches if other.is_of_living_wrapper)]


def let_go(module: nn.Module, watch: Any) -> None:
    """Undo `hold`."""
    for part in _whole(module):
        held = vars(part).get(_KEY)
        if isinstance(held, _Held):
            held.watches = [other for other in held.watches if other is not watch]
            if not held.watches:
                del vars(part)[_KEY]


def _whole(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, and inside of it what has all of its parameters: a compiled module has one in it."""
    while True:
        yield module
        parts = list(module.children())
        if len(parts) != 1 or next(module.parameters(recurse=False), None) is not None:
            return
        module = parts[0]
