"""Patches of functions in torch (or Python), with recorders called on each call.

A patch forwards each call to the original: the original's frames count as torch's in a traceback, and its exceptions
propagate. A ddpcheck error never reaches the caller; it only disables the recorder that raised it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from ddpcheck.findings.errors import DDPCheckError
from ddpcheck.findings.tracebacks import forwards_calls, is_of_signal

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
OF_A_WRAPPER = ("parameters", "replicas", "reducer", "loop", "loss", "optimizers")  # check lines on wrapped steps

_INHERITED, _RETURNED = object(), object()

CALLER = 2  # frame depth from a `patched` callback to the caller of the replaced function


class Recorder:
    """Recorder of a part of a program; disabled by its first error.

    Once disabled (`is_off`), its public methods return empty values. `subjects` are the check lines that depend on it.
    """

    name = ""
    subjects: ClassVar[tuple[str, ...]] = ()
    is_off = False

    def __init_subclass__(cls, subjects: tuple[str, ...] = (), inner: Collection[str] = ()) -> None:
        """Guard public methods except `inner`, which cannot raise or whose caller handles errors."""
        cls.subjects, cls.name = subjects, cls.__name__
        for name, function in [*vars(cls).items()]:
            if name in inner or (name.startswith("_") and name != "__init__"):
                continue
            if isinstance(function, FunctionType):
                setattr(cls, name, _guard_method(function))
            elif isinstance(function, property) and function.fget is not None:
                setattr(cls, name, property(_guard_method(function.fget)))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # attributes that an aborted `__init__` did not set
            if not self.is_off or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return _EmptyValue()


class _EmptyValue:
    def __getattr__(self, _name: str) -> _EmptyValue:
        return self

    def __call__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0


_EMPTY: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, frozenset, dict)}
_EMPTY |= {"Mapping": dict, "Iterator": tuple, "Sequence": tuple}


def _guard_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method: an error disables its recorder and returns an empty value."""
    returned = str(method.__annotations__.get("return", "")).partition("[")[0]
    nothing = _EMPTY.get(returned, lambda: None)

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.is_off:
            return nothing()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            ErrorGuard.take(error, self)
            return nothing()

    return call


def one_line_error(error: Exception) -> str:
    """Return the class and the first sentence of the message of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]


class ErrorGuard:
    """Handler of errors in ddpcheck's code that torch or a script calls."""

    error_handler: ClassVar[Callable[[Exception, Recorder], object] | None] = None  # error handler; None: raise

    @classmethod
    def take(cls, error: Exception, recorder: Recorder) -> None:
        """Handle `error` by disabling `recorder`; re-raise a `DDPCheckError` or a signal handler's exception."""
        if cls.error_handler is None or isinstance(error, DDPCheckError) or is_of_signal(error):
            raise error
        if not recorder.is_off:
            recorder.is_off = True
            cls.error_handler(error, recorder)


def recorder_of(function: Any) -> Recorder:
    """Return the recorder that owns a method, or a new recorder for a function."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Recorder):
        return owner
    recorder = Recorder()
    recorder.name = getattr(function, "__qualname__", type(function).__qualname__)
    return recorder


def guarded(function: Callable[_Args, _Result], recorder: Recorder | None = None) -> Callable[_Args, _Result | None]:
    """Wrap a hook: an error disables its recorder and returns None."""
    owner = recorder or recorder_of(function)
    errors, is_finalizing = ErrorGuard, sys.is_finalizing  # module globals may be cleared at interpreter exit

    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result | None:
        if owner.is_off or is_finalizing():
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            errors.take(error, owner)
            return None

    return call


class Patch(AbstractContextManager[None]):
    """Patch of an attribute until `undo` or the end of the `with` block."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace attribute `name` of a module or class by `make(original)`, marked with `forwards_calls`."""
        original = vars(owner).get(name, _INHERITED)
        replacement = make(getattr(owner, name))
        for function in (replacement, getattr(replacement, "fget", None), getattr(replacement, "fset", None)):
            if isinstance(function, FunctionType):
                forwards_calls(function)
        replacement = staticmethod(replacement) if isinstance(original, staticmethod) else replacement
        assign = functools.partial(setattr, owner, name)
        self.redo = functools.partial(assign, replacement)
        self.undo = (
            functools.partial(delattr, owner, name) if original is _INHERITED else functools.partial(assign, original)
        )
        self.redo()

    def __enter__(self) -> None:
        """Do nothing: `__init__` has installed the patch."""

    def __exit__(self, *_error: object) -> None:
        self.undo()


def patched(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """Call `around` with the same arguments on each call of `owner.name`.

    A plain function runs before the original. A generator function runs to its `yield` before the original and is then
    sent the result; if the original raises, the generator is closed.
    """
    return Patch(owner, name, functools.partial(accompany, around=around))


def accompany(original: Any, around: Callable[..., Any]) -> Any:
    """Wrap `original` to call `around` on each call, as `patched` does."""
    import torch  # imported late: this module must not require torch

    is_generator, owner = inspect.isgeneratorfunction(around), recorder_of(around)
    errors, is_compiling, is_finalizing = ErrorGuard, torch.compiler.is_compiling, sys.is_finalizing  # locals: speed

    @functools.wraps(original)
    @forwards_calls
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or owner.is_off or is_finalizing():  # while tracing, compile the original
            return original(*args, **kwargs)
        running: Generator[None, Any, None] | None = None
        try:
            callback_result = around(*args, **kwargs)
            if is_generator and next(callback_result, _RETURNED) is not _RETURNED:
                running = callback_result
        except Exception as error:
            errors.take(error, owner)
        if running is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            guarded(running.close, owner)()
            raise
        if not owner.is_off:
            try:
                running.send(result)
            except StopIteration:
                pass
            except Exception as error:
                errors.take(error, owner)
        return result

    return call
