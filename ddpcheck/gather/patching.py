"""Functions that stand in the place of torch's (or Python's): the one way in which ddpcheck puts them there.

They hand each call on to the original, whose frames count as torch's in a traceback, and whose exceptions pass. What is
told of a call is guarded: an error of ours never gets into the code that makes the call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar

from ddpcheck.findings.tracebacks import is_of_signal, passes_on

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_INHERITED, _RETURNED = object(), object()

CALLER = 2
"""Frames from a function that is called with another one, by `patched`, to what calls that one."""


class OwnErrors:
    """Where errors of ddpcheck's go that come up in what torch or a script has called."""

    taken_by: ClassVar[Callable[[Exception], object] | None] = None  # takes one, where it is set; else it is raised
    # whether nothing of ours does anything any more. No hook is removed: torch may be calling them one after the other
    all_off: ClassVar[bool] = False

    @classmethod
    def take(cls, error: Exception) -> None:
        """Have one taken, or raise it: also what the handler of a signal has raised, which is meant for the script."""
        if cls.taken_by is None or is_of_signal(error):
            raise error
        cls.taken_by(error)


def guarded(function: Callable[_Given, _Result]) -> Callable[_Given, _Result | None]:
    """`function` as a hook: it is off with all of them, and an error of it goes where theirs go."""
    errors, is_finalizing = OwnErrors, sys.is_finalizing  # the names of a module are gone when the interpreter ends

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result | None:
        if errors.all_off or is_finalizing():
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            errors.take(error)
            return None

    return call


class Patch(AbstractContextManager[None]):
    """An attribute that has been replaced: until the end of a `with`, until `undo`, or until the process ends.

    Attributes:
        redo: Puts what was made in the place of the original once more.
        undo: Puts the original back.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of the attribute `name` of a module or a class; it `passes_on`."""
        original = vars(owner).get(name, _INHERITED)
        made = make(getattr(owner, name))
        for function in (made, getattr(made, "fget", None), getattr(made, "fset", None)):
            if isinstance(function, FunctionType):
                passes_on(function)
        made = staticmethod(made) if isinstance(original, staticmethod) else made
        put = functools.partial(setattr, owner, name)
        self.redo = functools.partial(put, made)
        self.undo = (
            functools.partial(delattr, owner, name) if original is _INHERITED else functools.partial(put, original)
        )
        self.redo()

    def __enter__(self) -> None:
        """It has been in place since it was made."""

    def __exit__(self, *_error: object) -> None:
        self.undo()


def patched(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Have each call of a function go with one of `around`, which gets the same arguments.

    A plain function is called before the original, and a generator function runs to its `yield` before it, and is sent
    the result, unless it has returned before; where the original raises, it is closed.
    """
    return Patch(owner, name, functools.partial(accompanied, around=around))


def accompanied(original: Any, around: Callable[..., Any]) -> Any:
    """`original` as `patched` replaces it."""
    import torch  # which has been imported where something of it is replaced

    both, is_compiling = inspect.isgeneratorfunction(around), torch.compiler.is_compiling
    errors, is_finalizing = OwnErrors, sys.is_finalizing  # here, since most calls of a step come through this frame

    @functools.wraps(original)
    @passes_on
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or errors.all_off or is_finalizing():  # where it is traced, what is compiled is the original
            return original(*args, **kwargs)
        running: Generator[None, Any, None] | None = None
        try:
            begun = around(*args, **kwargs)
            if both and next(begun, _RETURNED) is not _RETURNED:
                running = begun
        except Exception as error:
            errors.take(error)
        if running is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            guarded(running.close)()
            raise
        if not errors.all_off:
            try:
                running.send(result)
            except StopIteration:
                pass
            except Exception as error:
                errors.take(error)
        return result

    return call
