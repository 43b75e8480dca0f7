"""Variables, attributes and items that functions and objects of the user's hold, and how one is put back.

The three that look through them differ in what they look for: `external_state`, `unregistered_leaves`, `program_data`.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from ddpcheck.findings.source_lines import file_of_class, file_of_module, is_of_program, is_user_file

PLAIN = (int, float, complex, bool, str, bytes, type(None))  # values that hold nothing else

NUMBERS = (int, float, complex)
"""Types of counters: where one is new, a step has made it. A flag, for something that is made once, is none."""

_MOST_NUMBERS = 1 << 16


class Variable(NamedTuple):
    """A variable that code of the user's can reach by name."""

    name: str
    kind: str  # of variable, in words
    value: Any
    bind: Callable[[Any], None]  # binds it to another value; where that cannot be done, does nothing


def unbindable(_value: Any) -> None:
    """Does not bind a variable that cannot have been bound to another value."""


def function_variables(function: FunctionType) -> Iterator[Variable]:
    """Variables of a function: its closure, the globals that its code names, its default arguments and attributes."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
        yield Variable(name, "closure variable", content, functools.partial(setattr, cell, "cell_contents"))
    space = function.__globals__
    for name in _names(code):
        if name in space:
            yield Variable(name, "global variable", space[name], functools.partial(space.__setitem__, name))
    defaults = function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, item in {**dict(zip(last, defaults, strict=True)), **(function.__kwdefaults__ or {})}.items():
        yield Variable(name, "default argument", item, unbindable)
    attributes = vars(function)
    for name, item in list(attributes.items()):
        bind = functools.partial(attributes.__setitem__, name)
        yield Variable(f"{function.__name__}.{name}", "attribute", item, bind)


def _names(code: CodeType) -> dict[str, None]:
    """The globals and attributes that code names, and those inside it too."""
    found: dict[str, None] = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def is_user_function(function: FunctionType) -> bool:
    """Whether a function comes from a file of the user's."""
    return is_user_file(function.__code__.co_filename)


def is_user_namespace(holder: type | ModuleType) -> bool:
    """Whether a class or a module comes from a file of the user's, and not from an installed package."""
    return is_of_program(file_of_class(holder) if isinstance(holder, type) else file_of_module(holder))


def is_user_object(value: Any) -> bool:
    """Whether `value` is an object of the user's that carries attributes (a schedule, say)."""
    if isinstance(value, nn.Module | type | ModuleType | FunctionType | MethodType):
        return False
    module = str(type(value).__module__)  # of a class written in C it need not be one
    if module.partition(".")[0] in ("torch", "builtins", "numpy", "ddpcheck"):
        return False
    try:
        return isinstance(vars(value), dict)
    except Exception:  # no attributes, or an object that does not like to be asked
        return False


def is_small_array(value: Any) -> bool:
    """Whether `value` is an array of numpy's, of numbers, that is small enough to be state."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None and type(value) is numpy.ndarray and value.size <= _MOST_NUMBERS and not value.dtype.hasobject
    )


def refill(container: Any, items: Any) -> None:
    """Put `items` into a list, deque, set, mapping or array in place of its own."""
    if is_small_array(container):
        if container.flags.writeable and container.shape == items.shape:
            container[...] = items
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)
