"""Functions in the place of torch's (or Python's), and the recorders that are called with each call.

A function hands each call on to the original, whose frames count as torch's in a traceback, and whose exceptions pass.
An error of ours never gets into the code that makes the call: it ends the recorder that has raised it, and no other.
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
from ddpcheck.findings.tracebacks import is_of_signal, passes_on

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
OF_A_WRAPPER = ("parameters", "replicas", "reducer", "loop", "loss", "optimizers")  # check lines, of its steps

_INHERITED, _RETURNED = object(), object()

CALLER = 2  # frames from what `patched` calls to what calls the replaced function


class Recorder:
    """Records a part of a program until an error in one of its methods, which ends this recorder alone.

    From then on (`is_off`) its public methods return empty values. `subjects` are the check lines that depend on it.
    """

    name = ""
    subjects: ClassVar[tuple[str, ...]] = ()
    is_off = False

    def __init_subclass__(cls, subjects: tuple[str, ...] = (), inner: Collection[str] = ()) -> None:
        """Guard public methods but those of `inner`, which cannot raise, or whose caller handles errors."""
        cls.subjects, cls.name = subjects, cls.__name__
        for name, function in [*vars(cls).items()]:
            if name in inner or (name.startswith("_") and name != "__init__"):
                continue
            if isinstance(function, FunctionType):
                setattr(cls, name, _ending(function))
            elif isinstance(function, property) and function.fget is not None:
                setattr(cls, name, property(_ending(function.fget)))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # that `__init__` has not come to
            if not self.is_off or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return _Nothing()


class _Nothing:
    def __getattr__(self, _name: str) -> _Nothing:
        return self

    def __call__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0


_EMPTY: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, frozenset, dict)}
_EMPTY |= {"Mapping": dict, "Iterator": tuple, "Sequence": tuple}


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a method: an error in it ends its recorder."""
    returned = str(method.__annotations__.get("return", "")).partition("[")[0]
    nothing = _EMPTY.get(returned, lambda: None)

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if self.is_off:
            return nothing()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            OwnErrors.take(error, self)
            return nothing()

    return call


def in_a_line(error: Exception) -> str:
    """The class of an error, and the first sentence of what it says."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]


class OwnErrors:
    """The receiver of ddpcheck's own errors in calls by torch or a script."""

    taken_by: ClassVar[Callable[[Exception, Recorder], object] | None] = None  # takes one; else it is raised

    @classmethod
    def take(cls, error: Exception, recorder: Recorder) -> None:
        """Switch a recorder off, or raise an error that is meant for the script: of a signal, or a finding."""
        if cls.taken_by is None or isinstance(error, DDPCheckError) or is_of_signal(error):
            raise error
        if not recorder.is_off:
            recorder.is_off = True
            cls.taken_by(error, recorder)


def recorder_of(function: Any) -> Recorder:
    """Return the recorder of a method; a new one for any other function."""
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__self__", None)
    if isinstance(found, Recorder):
        return found
    alone = Recorder()
    alone.name = getattr(function, "__qualname__", type(function).__qualname__)
    return alone


def guarded(function: Callable[_Given, _Result], recorder: Recorder | None = None) -> Callable[_Given, _Result | None]:
    """Wrap a hook: an error in it ends its recorder."""
    mine = recorder or recorder_of(function)
    errors, is_finalizing = OwnErrors, sys.is_finalizing  # the names of a module are gone when the interpreter ends

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result | None:
        if mine.is_off or is_finalizing():
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            errors.take(error, mine)
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

    both, is_compiling, mine = inspect.isgeneratorfunction(around), torch.compiler.is_compiling, recorder_of(around)
    errors, is_finalizing = OwnErrors, sys.is_finalizing  # here, since most calls of a step come through this frame

    @functools.wraps(original)
    @passes_on
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or mine.is_off or is_finalizing():  # where it is traced, what is compiled is the original
            return original(*args, **kwargs)
        running: Generator[None, Any, None] | None = None
        try:
            begun = around(*args, **kwargs)
            if both and next(begun, _RETURNED) is not _RETURNED:
                running = begun
        except Exception as error:
            errors.take(error, mine)
        if running is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            guarded(running.close, mine)()
            raise
        if not mine.is_off:
            try:
                running.send(result)
            except StopIteration:
                pass
            except Exception as error:
                errors.take(error, mine)
        return result

    return call
