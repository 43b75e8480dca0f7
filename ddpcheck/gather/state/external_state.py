"""State that a recipe keeps outside of its modules: counters, averages and generators in globals, closures, objects.

A step is run several times, and each run must find what the first one found.
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
_MOST_ITEMS = 200  # of a container; a vocabulary is no state
_MOST_ELEMENTS = 1 << 20  # of a tensor; a data set is no state

Restore = Callable[[], None]


class ExternalState:
    """The state that functions of a recipe and methods of its modules reach without being given it.

    What is in `ignore`, by identity, is put back by other means.
    """

    def __init__(self, functions: Collection[Any], module: nn.Module, ignore: Collection[int]) -> None:
        classes = {type(submodule) for submodule in module.modules()}
        methods = [f for cls in classes for f in vars(cls).values() if isinstance(f, FunctionType)]
        self._roots = [*(f for f in functions if f is not None), *methods]
        self._ignore = frozenset(ignore)

    def capture(self) -> list[Restore]:
        """Functions that put the state back to what it is now; see `put_back`."""
        undo: list[Restore] = []
        seen = set(self._ignore)
        for root in self._roots:
            undo += _remember(root, reachable.unbindable, 0, seen)
        return undo


def put_back(undo: Collection[Restore]) -> None:
    """Put a captured state back; may be done again and again."""
    with torch.no_grad():
        for step in undo:
            step()


def _remember(value: Any, put: Callable[[Any], None], depth: int, seen: set[int]) -> Iterator[Restore]:
    """Closures that bring `value`, and what it holds, back to what they are now; `put` binds it to its name again."""
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
        if next(value.parameters(), None) is None:  # one that is trained belongs to the step
            state = capture_state(value)
            yield lambda: state.restore(value)
    elif (generator := own_generator(value)) is not None:
        drawn = generator.read()
        yield lambda: generator.write(drawn)
    elif isinstance(value, FunctionType):
        if not reachable.is_user_function(value):
            return
        for space in (value.__globals__, vars(value)):
            if id(space) not in seen:
                seen.add(id(space))
                yield _forget_new_numbers(space, space.pop)
        for variable in reachable.function_variables(value):
            yield from _remember(variable.value, variable.bind, depth + 1, seen)
    elif isinstance(value, MethodType):
        yield from _remember(value.__func__, reachable.unbindable, depth, seen)
        yield from _remember(value.__self__, reachable.unbindable, depth + 1, seen)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _remember(part, reachable.unbindable, depth + 1, seen)
    elif type(value) in _CONTAINERS or reachable.is_small_array(value):
        # Of a subclass, what it gives for a key need not be what it holds.
        held = list(value.values() if isinstance(value, dict) else value) if type(value) in _CONTAINERS else []
        if len(held) > _MOST_ITEMS:
            return
        items = copy.copy(value)

        def undo_items() -> None:
            put(value)
            reachable.refill(value, items)

        yield undo_items
        for item in held:
            if not isinstance(item, reachable.PLAIN):
                yield from _remember(item, reachable.unbindable, depth + 1, seen)
    elif isinstance(value, type | ModuleType) or reachable.is_user_object(value):
        yield from _of_holder(value, depth, seen)


def _of_holder(holder: Any, depth: int, seen: set[int]) -> Iterator[Restore]:
    """A class, a module or an object of the user's: its attributes."""
    bind: Callable[[str, Any], None] = functools.partial(setattr, holder)
    if isinstance(holder, type | ModuleType):
        if not reachable.is_user_namespace(holder):
            return
    else:
        bind = vars(holder).__setitem__  # past a `__setattr__` of the user's
        yield from _remember(type(holder), reachable.unbindable, depth + 1, seen)
    yield _forget_new_numbers(vars(holder), functools.partial(delattr, holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, property | classmethod | staticmethod) or (
            name.startswith("__") and not isinstance(value, FunctionType)
        ):
            continue
        yield from _remember(value, functools.partial(bind, name), depth + 1, seen)


def _forget_new_numbers(space: Mapping[str, Any], remove: Callable[[str], object]) -> Restore:
    """Removes names of counters that have come into a namespace since; what is made once, and a flag for it, stay."""
    before = frozenset(space)

    def undo() -> None:
        for name in [name for name, value in space.items() if name not in before and type(value) in reachable.NUMBERS]:
            remove(name)

    return undo
