"""State, weak references and hooks that the recorders of one rank share."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import call
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.findings.errors import FindingsError
from ddpcheck.findings.evidence import Entry
from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.gather.patching import ErrorGuard, Recorder, patched, recorder_of
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import is_probed, is_sampled

Position = tuple[int, int, int]
"""(number of the loader, number of the pass over the loader, batches taken in the pass)"""


class Recording:
    """State of one rank, shared by its recorders."""

    def __init__(self, add: Callable[[Entry], object], every: int = 0, log: RankLog | None = None) -> None:
        self.add = add  # function that writes an entry to the log
        self.log: Any = log  # log of this rank
        self.every = every  # steps between two comparisons; 0 for never
        self.watches = WeakList()  # `WrapperRecorder` of each wrapper
        self.wrappers = 0  # number of wrappers constructed so far
        self.steps = 0  # number of optimizer steps, of all optimizers together
        self.rounds = 0  # largest step count of any optimizer
        self.taken = 0  # number of batches taken in the current passes over data loaders
        self.position: Position = (-1, -1, 0)  # current position in the data loaders
        self.batches: Counter[int] = Counter()  # number of batches taken, by data loader
        self.samples: Sequence[torch.Tensor] = ()  # copies of the tensors of the last batch, before a sampled step

    def count_step(self, *_arguments: object) -> None:
        self.steps += 1

    def is_written(self, number: int) -> bool:
        """Return True if entries of step `number` are recorded."""
        return is_sampled(number, self.every)

    def are_probed(self) -> bool:
        """Return True if the current step or round is sampled for detailed records."""
        return is_probed(self.steps) or is_probed(self.rounds)


class WeakList:
    """Weak references to a few objects; safe to modify during iteration.

    A `WeakSet` is too slow for the dozen look-ups per training step.
    """

    def __init__(self) -> None:
        self.refs: tuple[ref[Any], ...] = ()  # tuple of references, replaced on each change

    def add(self, thing: Any) -> None:
        self.refs = (*self.refs, ref(thing, self._remove_dead))

    def discard(self, thing: Any) -> None:
        self.refs = tuple(reference for reference in self.refs if reference() is not thing)

    def _remove_dead(self, dead: ref[Any]) -> None:
        self.refs = tuple(reference for reference in self.refs if reference is not dead)

    def __iter__(self) -> Iterator[Any]:
        return filter(None, [*map(call, self.refs)])

    def __bool__(self) -> bool:
        return bool(self.refs)


class Followers(WeakList):
    """Weak references to followed objects; hooks or patches are installed while any object remains.

    Remove the last object by `discard`: the garbage collector must not remove hooks while torch iterates over them.
    """

    def __init__(self, install: Callable[[], list[Callable[[], object]]]) -> None:
        super().__init__()
        self._install = install  # returns functions that undo the installation
        self._undo: list[Callable[[], object]] = []

    def add(self, thing: Any) -> None:
        super().add(thing)
        self._undo = self._undo or self._install()

    def discard(self, thing: Any) -> None:
        super().discard(thing)
        while self._undo and not self:
            self._undo.pop()()


class UnpickledHook:
    """Hook that is never pickled, copied, or compiled by `torch.compile`."""

    def __init__(self, method: Any, recorder: Recorder | None = None) -> None:
        self.method = method
        self._recorder = recorder or recorder_of(method)
        self._uncompiled_call = _uncompiled_call()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._recorder.is_off:
            return
        try:
            if _is_traced() or _callback_of_compiler() is not None:
                self._uncompiled_call(self.method, args, kwargs)
            else:  # cheaper than calling a function under `torch.compiler.disable`
                self.method(*args, **kwargs)
        except FindingsError as error:  # hide frames of ddpcheck in the traceback
            raise error.with_traceback(None) from None
        except Exception as error:
            ErrorGuard.take(error, self._recorder)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_nothing,)


# active compiler callback of this thread; private to torch: if missing, functions called by a hook may be compiled
_callback_of_compiler: Callable[[], Any] = getattr(
    sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", lambda: None
)
_is_traced = torch.compiler.is_dynamo_compiling


@functools.cache
def _uncompiled_call() -> Any:
    """Return a function that calls a method without compilation by `torch.compile`.

    Created with the first hook, not on import of this file: creation imports `torch._dynamo`, as the first DDP does.
    """

    def call(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        method(*args, **kwargs)

    # Exclude ddpcheck from `torch.compile`, also for hooks called by compiled code. Replacements of torch functions are
    # still traced, so that compiled code stays one graph. Private to torch: if missing, functions of ddpcheck are
    # compiled up to the recompilation limit.
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo import trace_rules

        for package in _NOT_TRACED:
            trace_rules.add(f"ddpcheck.{package}")
    return torch.compiler.disable(call)


_NOT_TRACED = (
    *("findings", "monitor", "recipe", "record", "rules", "stream", "trace", "worlds"),
    *("gather.autograd", "gather.ddp", "gather.state", "gather.steps"),
)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def remove_hooks(handles: list[Any]) -> None:
    """Remove hooks by their handles, and clear the list."""
    while handles:
        handles.pop().remove()


_step_followers = Followers(
    lambda: [
        register_optimizer_step_pre_hook(UnpickledHook(_before_step)).remove,
        register_optimizer_step_post_hook(UnpickledHook(_after_step)).remove,
    ]
)
follow_steps, unfollow_steps = _step_followers.add, _step_followers.discard
"""Call methods of an object before and after each optimizer step, or stop to (not during a step).

The object is referenced weakly. Calls `before_step(optimizer, has_closure, inside)` and `after_step(optimizer,
has_closure)`. `has_closure`: `step` got a closure, which runs forward and backward; `inside`: within a backward pass.
"""


def _before_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    has_closure, inside = len(arguments) + len(named) > 1 and _has_closure(arguments, named), in_backward()
    for follower in filter(None, map(call, _step_followers.refs)):
        follower.before_step(optimizer, has_closure, inside)


def _after_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    has_closure = len(arguments) + len(named) > 1 and _has_closure(arguments, named)
    for follower in filter(None, map(call, _step_followers.refs)):
        follower.after_step(optimizer, has_closure)


def _has_closure(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return any(map(callable, (*arguments[1:], *named.values())))  # the first argument is the optimizer


# Calls of `wrapper.forward(...)`, which run no hooks, detected in DDP's own forward

inside_forward: set[int] = set()
"""`id()` of each wrapper whose running forward pass was detected by hooks."""

_forward_followers = Followers(
    lambda: [
        patched(DistributedDataParallel, name, around).undo
        for name, around in (("_pre_forward", _call_enter), ("_post_forward", _call_leave))
    ]
)
follow_forward, unfollow_forward = _forward_followers.add, _forward_followers.discard
"""Call `note_direct_call` and `note_direct_return` of an object in each forward pass that runs no hooks, or stop to."""


def _call_enter(wrapper: nn.Module, /, *arguments: Any, **named: Any) -> None:
    for follower in _forward_followers if id(wrapper) not in inside_forward else ():
        follower.note_direct_call(wrapper, arguments, named)


def _call_leave(wrapper: nn.Module, *_arguments: Any) -> Generator[None, Any, None]:
    if id(wrapper) in inside_forward:
        return
    output = yield
    for follower in _forward_followers:
        follower.note_direct_return(wrapper, output)


# Watches kept alive by modules

_KEY = "_ddpcheck_watches"


class _KeptWatches:
    """Recorders that a module keeps alive, but that its copies and pickles omit."""

    __slots__ = ("watches",)

    def __init__(self) -> None:
        self.watches: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ()


def keep_alive(module: nn.Module, watch: Any) -> None:
    """Keep `watch` alive as long as `module`, which may be trained without the wrapper."""
    for part in _wrapped_parts(module):
        holder = vars(part).get(_KEY)
        if not isinstance(holder, _KeptWatches):
            holder = vars(part)[_KEY] = _KeptWatches()
        holder.watches = [watch, *(known_watch for known_watch in holder.watches if known_watch.has_live_wrapper)]


def stop_keeping_alive(module: nn.Module, watch: Any) -> None:
    """Stop keeping `watch` alive with `module` (see `keep_alive`)."""
    for part in _wrapped_parts(module):
        holder = vars(part).get(_KEY)
        if isinstance(holder, _KeptWatches):
            holder.watches = [known_watch for known_watch in holder.watches if known_watch is not watch]
            if not holder.watches:
                del vars(part)[_KEY]


def _wrapped_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module`, then the modules inside that it only wraps (as `torch.compile` does)."""
    while True:
        yield module
        parts = list(module.children())
        if len(parts) != 1 or next(module.parameters(recurse=False), None) is not None:
            return
        module = parts[0]
