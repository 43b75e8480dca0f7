"""Compilation on a rank: what a check compares runs without it, and the time that it takes is no hang.

Under `force_eager` torch runs what was compiled as it was written, so that dropout draws the same numbers wherever a
step is repeated, modes of ours see each operation, and a gradient that is missing is missing for a reason in the user's
code. The wrapper's step is run once more the way it was compiled (`ddpcheck.gather.phases.ddp_step`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from ddpcheck.findings.tracebacks import passes_on

ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For the environment of a rank: inductor then compiles in it, and starts no processes that would outlive it."""


@dataclass(slots=True)
class _Compiling:
    """State of compilation in this process."""

    asked: bool = False  # whether code outside of torch has asked for it
    eager: bool = False  # whether what was compiled is to run as it was written
    seconds: float = 0.0  # spent on it since `forget_time`
    since: float = 0.0  # when the one under way began, by `time.monotonic()`; 0 where none is
    tell: Callable[[float, float], None] = lambda seconds, since: None  # gets both whenever they change


_state = _Compiling()
_kept = contextlib.ExitStack()  # contexts that last as long as the process; one that nobody holds would end at once


def is_asked_for() -> bool:
    """Whether the user's code has called `torch.compile`, or may have before this process began to look."""
    return _state.asked


def watch_compiling(tell: Callable[[float, float], None]) -> None:
    """From now on, know in this process when code is compiled, and for how long; torch must have been imported.

    `tell` gets the seconds so far and since when one is under way, as of `_Compiling`, whenever one begins or ends.
    """
    torch: Any = sys.modules["torch"]
    _state.tell = tell
    if "torch._inductor.config" in sys.modules and os.environ.items() >= ONE_THREAD.items():
        sys.modules["torch._inductor.config"].compile_threads = 1  # type: ignore[attr-defined]  # has read it already
    original = torch.compile

    @functools.wraps(original)
    @passes_on
    def compile(*args: Any, **kwargs: Any) -> Any:
        inside = _is_of_torch(sys._getframe(1), torch)
        _state.asked |= not inside
        _begun()
        try:  # the first call imports the compiler, which takes seconds by itself
            _settle()
            compiled = original(*args, **kwargs)
        finally:
            _ended()
        return _compiled_all_the_same(compiled) if inside else compiled

    torch.compile = compile


def forget_time() -> None:
    """Count the time of compilation from nothing again."""
    if _state.seconds or _state.since:
        _state.seconds = _state.since = 0.0
        _state.tell(0.0, 0.0)


def run_as_written() -> None:
    """From now on, run in this process what is compiled as if it were not; for a check, not for a test.

    TorchScript as well: it profiles a function in its first calls, and then runs other code, which rounds otherwise.
    """
    if not _state.eager:
        _kept.enter_context(sys.modules["torch"].jit.optimized_execution(False))
    _state.eager = True
    if "torch._dynamo" in sys.modules:  # a preloaded module may hold compiled functions
        backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})  # private to torch
        _state.asked |= any(map(callable, backends.values()))  # torch itself leaves a None there
        _settle()


@contextlib.contextmanager
def stance(name: Literal["default", "force_eager"]) -> Iterator[None]:
    """A block in which compiled code is what runs, or what was written, on this thread and all others.

    Where torch has none (before 2.6), or while compiled code runs, it runs as it does outside of the block.
    """
    torch: Any = sys.modules["torch"]
    with contextlib.ExitStack() as block:
        if hasattr(torch.compiler, "set_stance") and "torch._dynamo" in sys.modules:
            with contextlib.suppress(RuntimeError):  # in a compiled region
                block.enter_context(torch.compiler.set_stance(name))
        yield


def _settle() -> None:
    """Have compilation timed, and put off where it is not wanted; may be called again (`torch._dynamo.reset`)."""
    import torch
    import torch._dynamo

    with contextlib.suppress(ImportError, AttributeError):  # private to torch: without it a compilation is not timed
        from torch._dynamo.callback import callback_handler

        if _begun not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(_begun)
            callback_handler.register_end_callback(_ended)
    if _state.eager and not torch.compiler.is_compiling():
        with contextlib.suppress(AttributeError, RuntimeError):  # since torch 2.6; while torch compiles it is too late
            torch.compiler.set_stance("force_eager")


def _begun(_arguments: Any = None) -> None:
    _state.since = time.monotonic()
    _state.tell(_state.seconds, _state.since)


def _ended(_arguments: Any = None) -> None:
    _state.seconds += time.monotonic() - _state.since
    _state.since = 0.0
    _state.tell(_state.seconds, 0.0)


def _is_of_torch(caller: FrameType, torch: Any) -> bool:
    """Whether torch itself compiles: control flow and flex attention cannot do without, whoever calls them."""
    file = caller.f_code.co_filename
    ours = caller.f_code.co_name in ("compile", "fn")  # `Module.compile`, and `torch.compile` as a decorator
    return file.startswith(os.path.dirname(torch.__file__) + os.sep) and not ours


def _compiled_all_the_same(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    @passes_on
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _state.eager or sys.modules["torch"].compiler.is_compiling():
            return function(*args, **kwargs)
        with stance("default"):
            return function(*args, **kwargs)

    return run
