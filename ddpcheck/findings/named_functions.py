"""Functions of the user's program that `wrapper-functions` and `step-function` in `[tool.ddpcheck]` name."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence

_VARIABLE = "_DDPCHECK_FUNCTIONS"
"""Environment variable of ranks: wrapper functions separated by ",", then ";" and the step function."""

wrappers: tuple[str, ...] = ()  # functions that only wrap calls of torch; reports show the lines of their callers
step: tuple[str, ...] = ()  # function that makes a training step


def set_named_functions(wrapper_functions: Sequence[str], step_function: str) -> None:
    """Set options `wrapper-functions` and `step-function` in this process and in ranks started later."""
    os.environ.pop(_VARIABLE, None)
    if wrapper_functions or step_function:
        os.environ[_VARIABLE] = f"{','.join(wrapper_functions)};{step_function}"
    read_named_functions()


def read_named_functions() -> None:
    """Read the options `wrapper-functions` and `step-function` from the environment of a rank."""
    global wrappers, step
    wrappers, step = map(_spellings, os.environ.get(_VARIABLE, ";").split(";"))
    is_wrapper.cache_clear()


def _spellings(names: str) -> tuple[str, ...]:
    """Return each name with and without its class: stack traces name only the method."""
    return tuple(s for name in names.split(",") if name for s in (name, re.sub(r"\.[A-Z]\w*(?=\.)", "", name)))


@functools.cache
def is_wrapper(file: str, function: str) -> bool:
    """Return True if this function wraps torch calls, according to option `wrapper-functions`."""
    return matches_name(wrappers, file, function)


@functools.cache
def matches_name(names: tuple[str, ...], file: str, function: str) -> bool:
    """Return True for a function in `names`: "lab.comm.reduce_mean", or any function of "lab/comm.py"."""
    path = os.path.abspath(file)
    dotted = f".{path.removesuffix('.py').removesuffix('/__init__').replace(os.sep, '.')}.{function}."
    return any(path.endswith(f"/{name}") if name.endswith(".py") else f".{name}." in dotted for name in names)


read_named_functions()
