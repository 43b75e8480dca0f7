"""Graph leaves that receive gradient but are not module parameters, and their variables."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import UnregisteredTensor
from ddpcheck.gather.autograd.autograd_graph import items_of, unregistered_tensors
from ddpcheck.gather.state.reachable import function_variables, is_user_function, is_user_namespace
from ddpcheck.recipe.recipe import Recipe

_DEEPEST = 6
_MOST = 20_000  # objects to visit; a data set may hold many more

_NamedTensor = tuple[str, str, torch.Tensor]  # name, kind of variable, and the tensor


def unregistered_leaves(
    leaves: Iterable[torch.Tensor],
    module: nn.Module,
    *,
    ignore: Sequence[torch.Tensor] = (),
    before: Mapping[int, torch.Tensor] | None = None,
    recipe: Recipe | None = None,
) -> tuple[UnregisteredTensor, ...]:
    """Return the leaves that receive gradient but are not parameters of `module`.

    A leaf created by the forward pass (e.g. the input of a gradient penalty) is not returned. `before`: tensors that
    existed before the forward pass, by `id`; default: the unregistered tensors of the module, and leaves that are an
    `nn.Parameter`. `ignore`: tensors to omit from the result.
    """
    known = {id(p) for p in module.parameters()} | {id(tensor) for tensor in ignore}
    unknown = [leaf for leaf in leaves if id(leaf) not in known and leaf.requires_grad]
    if not unknown:
        return ()
    names = {id(tensor): (name, kind) for name, kind, tensor in reachable_tensors(module, recipe)}
    if before is None:
        before = {id(leaf): leaf for leaf in unknown if isinstance(leaf, nn.Parameter)}
        before |= {id(tensor): tensor for _, tensor in unregistered_tensors(module)}
    unregistered = []
    for leaf in unknown:
        if id(leaf) in before:
            name, kind = names.get(id(leaf), (f"a tensor of shape {tuple(leaf.shape)}", ""))
            unregistered.append(UnregisteredTensor(name, tuple(leaf.shape), kind=kind))
    return tuple(sorted(unregistered, key=lambda item: item.name))


def reachable_tensors(module: nn.Module, recipe: Recipe | None) -> list[_NamedTensor]:
    """Return named tensors that the recipe's loss function uses, then tensors of the module."""
    named = [*module.named_buffers(), *unregistered_tensors(module)]
    return [*function_tensors(getattr(recipe, "loss", None), module), *((name, "", tensor) for name, tensor in named)]


def function_tensors(loss: Any, module: nn.Module) -> Iterator[_NamedTensor]:
    """Yield tensors in globals, closures, defaults and class attributes of `loss` and module methods."""
    seen = {id(submodule) for submodule in module.modules()}

    def search(value: Any, name: str, kind: str, depth: int) -> Iterator[_NamedTensor]:
        if depth > _DEEPEST or len(seen) > _MOST or isinstance(value, str | bytes | int | float | None):
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield name, kind, value
        elif isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                yield from search(parameter, f"{name}.{inner}", kind, depth)
        elif isinstance(value, FunctionType):
            for variable in function_variables(value) if is_user_function(value) else ():
                yield from search(variable.value, variable.name, variable.kind, depth + 1)
        elif isinstance(value, MethodType):
            yield from search(value.__func__, name, kind, depth)
            yield from search(value.__self__, name, kind, depth + 1)
        elif isinstance(value, functools.partial):
            yield from search(value.func, name, kind, depth + 1)
            arguments = {**{f"argument {index}": item for index, item in enumerate(value.args)}, **value.keywords}
            for key, item in arguments.items():
                yield from search(item, key, "bound argument", depth + 1)
        elif isinstance(value, type | ModuleType):
            kind = "class attribute" if isinstance(value, type) else "global variable"
            for key, item in list(vars(value).items()) if is_user_namespace(value) else ():
                if not key.startswith("__") or isinstance(item, FunctionType):
                    plain = item.__func__ if isinstance(item, staticmethod | classmethod) else item
                    yield from search(plain, f"{name}.{key}", kind, depth + 1)
        else:
            for suffix, item in items_of(value):
                yield from search(item, f"{name}{suffix}", kind, depth + 1)
            if not isinstance(value, list | tuple | dict | set | frozenset):
                yield from search(type(value), type(value).__name__, "class attribute", depth + 1)

    yield from search(loss, "loss", "", 0)
    for cls in dict.fromkeys(cls for submodule in module.modules() for cls in type(submodule).__mro__):
        yield from search(cls, cls.__name__, "class attribute", 0)
