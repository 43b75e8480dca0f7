"""Records calls of `DistributedDataParallel.no_sync`, and its begin and end, on wrappers that are watched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

from ddpcheck.findings.source_lines import user_location

_DDP: Any = nn.parallel.DistributedDataParallel
_listeners: WeakKeyDictionary[nn.Module, WeakMethod[Callable[..., None]]] = WeakKeyDictionary()
_original: list[Any] = []


def listen(wrapper: nn.Module, note: Callable[..., None]) -> None:
    """From now on, call `note` with each "no_sync" (and `where`), "enter no_sync" and "leave no_sync"."""
    if not _original:
        _original.append(_DDP.no_sync)
        _DDP.no_sync = _noted(_DDP.no_sync)
    _listeners[wrapper] = WeakMethod(note)  # which would keep the wrapper alive


def forget(wrapper: nn.Module | None) -> None:
    """Stop listening to `wrapper`, which may be gone."""
    if wrapper is not None:
        _listeners.pop(wrapper, None)
    if _original and not _listeners:
        _DDP.no_sync = _original.pop()


def _noted(original: Any) -> Any:
    @functools.wraps(original)
    def no_sync(self: nn.Module) -> Any:
        found = _listeners.get(self)
        note = found() if found is not None else None
        context = original(self)
        if note is None:
            return context
        where = user_location()
        note("no_sync", where=str(where) if where else "")
        return _Noted(context, note)

    return no_sync


class _Noted(contextlib.ContextDecorator):
    def __init__(self, inner: Any, note: Callable[..., None]) -> None:
        self._inner = inner
        self._note = note

    def __enter__(self) -> Any:
        self._note("enter no_sync")
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._note("leave no_sync")
        return self._inner.__exit__(*error)
