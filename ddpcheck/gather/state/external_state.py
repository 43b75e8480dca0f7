"""Recipe state outside of modules: counters, averages and generators in globals and closures.

A step runs several times, and each run must start from the same state.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.state import reachable
from ddpcheck.gather.state.module_state import capture_state
from ddpcheck.gather.state.randomness import own_generator

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_DEEPEST = 4
_MOST_ITEMS = 200  # per container; larger ones, e.g. a vocabulary, are not state
_MOST_ELEMENTS = 1 << 20  # per tensor; larger ones, e.g. a data set, are not state

Restore = Callable[[], None]


class ExternalState:
    """State that recipe functions and module methods reach through globals and closures.

    Objects in `ignore` (by `id`) are restored elsewhere.
    """

    def __init__(self, functions: Collection[Any], module: nn.Module, ignore: Collection[int]) -> None:
        classes = {type(submodule) for submodule in module.modules()}
        methods = [f for cls in classes for f in vars(cls).values() if isinstance(f, FunctionType)]
        self._roots = [*(f for f in functions if f is not None), *methods]
        self._ignore = frozenset(ignore)

    def capture(self) -> list[Restore]:
        """Return functions that restore the current state; see `put_back`."""
        undo: list[Restore] = []
        seen = set(self._ignore)
        for root in self._roots:
            undo += _remember(root, reachable.unbindable, 0, seen)
        return undo


def put_back(undo: Collection[Restore]) -> None:
    """Restore a captured state; may be called repeatedly."""
    with torch.no_grad():
        for step in undo:
            step()


def _remember(value: Any, put: Callable[[Any], None], depth: int, seen: set[int]) -> Iterator[Restore]:
    """Yield functions that restore `value` and its contents; `put` rebinds its name."""
    if isinstance(value, reachable.PLAIN):
        yield lambda: put(value)
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.requires_grad and value.numel() <= _MOST_ELEMENTS:
            saved = value.clone()

            def undo() -> None:
                put(value)
                value.copy_(saved)

            yield undo
    elif isinstance(value, nn.Module):
        if next(value.parameters(), None) is None:  # modules with parameters are restored with the step
            state = capture_state(value)
            yield lambda: state.restore(value)
    elif (generator := own_generator(value)) is not None:
        drawn = generator.read()
        yield lambda: generator.write(drawn)
    elif isinstance(value, FunctionType):
        if not reachable.is_user_function(value):
            return
        for namespace in (value.__globals__, vars(value)):
            if id(namespace) not in seen:
                seen.add(id(namespace))
                yield _restore_without_new_counters(namespace, namespace.pop)
        for variable in reachable.function_variables(value):
            yield from _remember(variable.value, variable.bind, depth + 1, seen)
    elif isinstance(value, MethodType):
        yield from _remember(value.__func__, reachable.unbindable, depth, seen)
        yield from _remember(value.__self__, reachable.unbindable, depth + 1, seen)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _remember(part, reachable.unbindable, depth + 1, seen)
    elif type(value) in _CONTAINERS or reachable.is_small_array(value):
        # Skip the items of subclasses: item access may be overridden.
        content = list(value.values() if isinstance(value, dict) else value) if type(value) in _CONTAINERS else []
        if len(content) > _MOST_ITEMS:
            return
        items = copy.copy(value)

        def undo_items() -> None:
            put(value)
            reachable.refill(value, items)

        yield undo_items
        for item in content:
            if not isinstance(item, reachable.PLAIN):
                yield from _remember(item, reachable.unbindable, depth + 1, seen)
    elif isinstance(value, type | ModuleType) or reachable.is_user_object(value):
        yield from _of_holder(value, depth, seen)


def _of_holder(holder: Any, depth: int, seen: set[int]) -> Iterator[Restore]:
    bind: Callable[[str, Any], None] = functools.partial(setattr, holder)
    if isinstance(holder, type | ModuleType):
        if not reachable.is_user_namespace(holder):
            return
    else:
        bind = vars(holder).__setitem__  # bypass a user-defined `__setattr__`
        yield from _remember(type(holder), reachable.unbindable, depth + 1, seen)
    yield _restore_without_new_counters(vars(holder), functools.partial(delattr, holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, property | classmethod | staticmethod) or (
            name.startswith("__") and not isinstance(value, FunctionType)
        ):
            continue
        yield from _remember(value, functools.partial(bind, name), depth + 1, seen)


def _restore_without_new_counters(namespace: Mapping[str, Any], remove: Callable[[str], object]) -> Restore:
    """Return a function that deletes new counters; cached objects and flags stay."""
    before = frozenset(namespace)

    def undo() -> None:
        for name in [
            name for name, value in namespace.items() if name not in before and type(value) in reachable.NUMBERS
        ]:
            remove(name)

    return undo
