"""Weak references to tensors that torch does not notice.

`torch.utils.swap_tensors` refuses tensors that have weak references. `Module.to` and others call it for parameters that
are DTensors, so for models that `fully_shard` has sharded, and for all where
`torch.__future__.set_swap_module_params_on_conversion(True)` was called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import getweakrefs, ref

import torch

from ddpcheck.gather.patching import patched


def tensor_ref(tensor: torch.Tensor) -> Callable[[], Any]:
    """A weak reference to a tensor: to be called, as one of `weakref` is."""
    _follow_swaps()
    return _TensorRef(tensor)


class _TensorRef:
    """It holds the only reference to what torch would find, so that it can let go of that."""

    __slots__ = ("__weakref__", "_found")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.hold(tensor)

    def __call__(self) -> Any:
        return self._found and self._found()

    def hold(self, tensor: torch.Tensor) -> None:
        self._found: _FoundByTorch | None = _FoundByTorch(tensor)
        self._found.holder = ref(self)

    def let_go(self) -> None:
        self._found = None


class _FoundByTorch(ref[torch.Tensor]):
    __slots__ = ("holder",)
    holder: Callable[[], _TensorRef | None]


@functools.cache
def _follow_swaps() -> None:
    if hasattr(torch.utils, "swap_tensors"):
        patched(torch.utils, "swap_tensors", _swapping)


def _swapping(*tensors: torch.Tensor) -> Iterator[None]:
    """Let go of both; each is the same object afterwards."""
    held = [(one, tensor) for tensor in tensors for one in _holders_of(tensor)]
    for one, _ in held:
        one.let_go()
    try:
        yield
    finally:
        for one, tensor in held:
            one.hold(tensor)


def _holders_of(tensor: torch.Tensor) -> list[_TensorRef]:
    found = (one.holder() for one in getweakrefs(tensor) if isinstance(one, _FoundByTorch))
    return [holder for holder in found if holder is not None]
