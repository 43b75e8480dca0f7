"""Hooks of a watch, which are dropped when their module is copied or pickled, and what keeps a watch alive."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from operator import call
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import nn

from ddpcheck.findings.errors import FindingsError
from ddpcheck.gather.patching import OwnErrors, Recorder, recorder_of

_Thing = TypeVar("_Thing")


class Living(Generic[_Thing]):
    """Weak references to a few objects; it may change while it is iterated over.

    Watches are asked for a dozen times in each step of a loop, for which a `WeakSet` is slow.

    Attributes:
        refs: The references, in another tuple whenever something has changed.
    """

    def __init__(self) -> None:
        self.refs: tuple[ref[_Thing], ...] = ()

    def add(self, thing: _Thing) -> None:
        """Add an object, as long as it lives."""
        self.refs = (*self.refs, ref(thing, self._gone))

    def discard(self, thing: _Thing) -> None:
        """Leave an object out, if it is there."""
        self.refs = tuple(one for one in self.refs if one() is not thing)

    def _gone(self, dead: ref[_Thing]) -> None:
        self.refs = tuple(one for one in self.refs if one is not dead)

    def __iter__(self) -> Iterator[_Thing]:
        return filter(None, [*map(call, self.refs)])

    def __bool__(self) -> bool:
        return bool(self.refs)


class UnpickledHook:
    """A hook that is dropped when its module is pickled or copied, and that `torch.compile` does not compile."""

    def __init__(self, method: Any, recorder: Recorder | None = None) -> None:
        self.method = method
        self._recorder = recorder or recorder_of(method)
        self._not_compiled = _not_compiled()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._recorder.is_off:
            return
        try:
            if _is_traced() or _callback_of_compiler() is not None:
                self._not_compiled(self.method, args, kwargs)
            else:  # this question costs less than the call of a function that the compiler leaves alone
                self.method(*args, **kwargs)
        except FindingsError as error:  # the frames of ddpcheck are of no use to a reader
            raise error.with_traceback(None) from None
        except Exception as error:
            OwnErrors.take(error, self._recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_nothing,)


def _found_callback() -> Callable[[], Any]:
    """A function that gives what compiles the functions which this thread calls now; `None` where nothing does.

    Private to torch: where it is not there, functions that a hook calls in compiled code may be compiled.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        return eval_frame.get_eval_frame_callback
    return lambda: None


_callback_of_compiler = _found_callback()
_is_traced = torch.compiler.is_dynamo_compiling


@functools.cache
def _not_compiled() -> Any:
    """A function that calls a method, and that `torch.compile` leaves as it is.

    Made with the first hook, and not on import: it imports `torch._dynamo`, as the wrapper's constructor has done then.
    """

    def call(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        method(*args, **kwargs)

    call = torch.compiler.disable(call)
    _leave_us_alone()
    return call


_NOT_TRACED = (
    *("findings", "judge", "monitor", "recipe", "record", "stream", "worlds"),
    *("gather.autograd", "gather.ddp", "gather.state", "gather.steps"),
)


def _leave_us_alone() -> None:
    """Have `torch.compile` compile no function of ddpcheck's, also where a hook is called by what it has compiled.

    Functions in the place of torch's are traced: while torch compiles they are what they replace, and code with one in
    it stays one graph. Private to torch: without it, our functions are compiled until they come to its limit of
    recompilations.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo import trace_rules

        for package in _NOT_TRACED:
            trace_rules.add(f"ddpcheck.{package}")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def remove_hooks(handles: list[Any]) -> None:
    """Remove hooks by their handles, which are dropped."""
    while handles:
        handles.pop().remove()


_KEY = "_ddpcheck_watches"


class _Held:
    """The watches that a module keeps alive; a copy or a pickle of the module has an empty tuple in their place."""

    __slots__ = ("watches",)

    def __init__(self) -> None:
        self.watches: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def hold(module: nn.Module, watch: Any) -> None:
    """Keep `watch` alive as long as `module`, unless it is closed: training may go on without its wrapper."""
    for part in _wrapped_parts(module):
        held = vars(part).get(_KEY)
        if not isinstance(held, _Held):
            held = vars(part)[_KEY] = _Held()
        held.watches = [watch, *(other for other in held.watches if other.is_of_living_wrapper)]


def release(module: nn.Module, watch: Any) -> None:
    """Undo `hold`."""
    for part in _wrapped_parts(module):
        held = vars(part).get(_KEY)
        if isinstance(held, _Held):
            held.watches = [other for other in held.watches if other is not watch]
            if not held.watches:
                del vars(part)[_KEY]


def _wrapped_parts(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, and the modules inside of it that have all of its parameters: a compiled module has one."""
    while True:
        yield module
        parts = list(module.children())
        if len(parts) != 1 or next(module.parameters(recurse=False), None) is not None:
            return
        module = parts[0]
