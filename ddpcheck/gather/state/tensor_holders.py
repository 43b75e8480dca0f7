"""The variables that hold a tensor outside of the module: what the loss and the module's methods can reach by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import contents
from ddpcheck.gather.state.reachable import function_variables, is_user_function, is_user_namespace

_DEEPEST = 6
_MOST = 20_000  # things to look at; who holds a data set has many

Held = tuple[str, str, torch.Tensor]
"""Name, kind of variable, and the tensor."""


def held_by_functions(loss: Any, module: nn.Module) -> Iterator[Held]:
    """Tensors that `loss` and the methods of modules find in globals, closures, default arguments and classes."""
    search = _Search(module)
    yield from search.value(loss, "loss", "", 0)
    for kind in dict.fromkeys(cls for submodule in module.modules() for cls in type(submodule).__mro__):
        yield from search.value(kind, kind.__name__, "class attribute", 0)


class _Search:
    """A walk through what can be reached, each thing once."""

    def __init__(self, module: nn.Module) -> None:
        self._seen = {id(submodule) for submodule in module.modules()}

    def value(self, value: Any, name: str, kind: str, depth: int) -> Iterator[Held]:
        """The tensors in `value`, which a variable of this kind and name holds."""
        if depth > _DEEPEST or len(self._seen) > _MOST or isinstance(value, str | bytes | int | float | None):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield name, kind, value
        elif isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                yield from self.value(parameter, f"{name}.{inner}", kind, depth)
        elif isinstance(value, FunctionType):
            for variable in function_variables(value) if is_user_function(value) else ():
                yield from self.value(variable.value, variable.name, variable.kind, depth + 1)
        elif isinstance(value, MethodType):
            yield from self.value(value.__func__, name, kind, depth)
            yield from self.value(value.__self__, name, kind, depth + 1)
        elif isinstance(value, functools.partial):
            yield from self.value(value.func, name, kind, depth + 1)
            given = {**{f"argument {place}": item for place, item in enumerate(value.args)}, **value.keywords}
            for key, item in given.items():
                yield from self.value(item, key, "bound argument", depth + 1)
        elif isinstance(value, type | ModuleType):
            yield from self._namespace(value, name, depth + 1)
        else:
            for suffix, item in contents(value):
                yield from self.value(item, f"{name}{suffix}", kind, depth + 1)
            if not isinstance(value, list | tuple | dict | set | frozenset):
                yield from self.value(type(value), type(value).__name__, "class attribute", depth + 1)

    def _namespace(self, holder: type | ModuleType, name: str, depth: int) -> Iterator[Held]:
        if not is_user_namespace(holder):
            return
        kind = "class attribute" if isinstance(holder, type) else "global variable"
        for key, item in list(vars(holder).items()):
            if not key.startswith("__") or isinstance(item, FunctionType):
                inner = item.__func__ if isinstance(item, staticmethod | classmethod) else item
                yield from self.value(inner, f"{name}.{key}", kind, depth)
