"""Variables, attributes and items reachable from user functions and objects, and their restoration.

Used by `module_state`, `unregistered_leaves` and `program_data`, which search for different things.
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

PLAIN = (int, float, complex, bool, str, bytes, type(None))  # values without contents

NUMBERS = (int, float, complex)
"""Types of counters: those that a step created are deleted. A bool is kept: it may mark what is created only once."""

_MOST_NUMBERS = 1 << 16


class Variable(NamedTuple):
    """Variable that user code reaches by name."""

    name: str
    kind: str  # "global variable", "closure variable", ...
    value: Any
    bind: Callable[[Any], None]  # rebinds the variable; no-op if not possible


def do_not_bind(_value: Any) -> None:
    """Do nothing; used as `Variable.bind` if the variable cannot be rebound."""


def function_variables(function: FunctionType) -> Iterator[Variable]:
    """Yield the closure, named globals, default arguments and attributes of a function."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # empty cell
            continue
        yield Variable(name, "closure variable", content, functools.partial(setattr, cell, "cell_contents"))
    namespace = function.__globals__
    for name in _global_names(code):
        if name in namespace:
            yield Variable(name, "global variable", namespace[name], functools.partial(namespace.__setitem__, name))
    defaults = function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, item in {**dict(zip(last, defaults, strict=True)), **(function.__kwdefaults__ or {})}.items():
        yield Variable(name, "default argument", item, do_not_bind)
    attributes = vars(function)
    for name, item in list(attributes.items()):
        bind = functools.partial(attributes.__setitem__, name)
        yield Variable(f"{function.__name__}.{name}", "attribute", item, bind)


def _global_names(code: CodeType) -> dict[str, None]:
    names: dict[str, None] = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def is_user_function(function: FunctionType) -> bool:
    return is_user_file(function.__code__.co_filename)


def is_user_namespace(holder: type | ModuleType) -> bool:
    """Return True if a class or module is user code, outside installed packages."""
    return is_of_program(file_of_class(holder) if isinstance(holder, type) else file_of_module(holder))


def is_user_object(value: Any) -> bool:
    """Return True if `value` is a user object with attributes (e.g. a schedule)."""
    if isinstance(value, nn.Module | type | ModuleType | FunctionType | MethodType):
        return False
    module = str(type(value).__module__)  # may not be a str for a C class
    if module.partition(".")[0] in ("torch", "builtins", "numpy", "ddpcheck"):
        return False
    try:
        return isinstance(vars(value), dict)
    except Exception:  # no attributes, or `__dict__` raises
        return False


def is_small_array(value: Any) -> bool:
    """Return True for a small numeric numpy array: state, not a data set."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None and type(value) is numpy.ndarray and value.size <= _MOST_NUMBERS and not value.dtype.hasobject
    )


def refill(container: Any, items: Any) -> None:
    """Set the contents of a list, deque, set, mapping or array, in place."""
    if is_small_array(container):
        if container.flags.writeable and container.shape == items.shape:
            container[...] = items
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)
