"""Control of `torch.compile` on a rank: eager execution in checks, compile time tracking.

In eager mode dropout draws the same numbers in every repetition of a step, our dispatch modes see each operation, and
a missing gradient has its cause in the user's code. The DDP step also runs once as compiled (`gather.phases.ddp_step`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Literal

from ddpcheck.findings.tracebacks import forwards_calls

ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Environment of a rank that keeps inductor from starting compile processes, which would outlive the rank."""


_state = SimpleNamespace(
    asked=False,  # code outside of torch has called torch.compile
    eager=False,  # run compiled code eagerly
    times=SimpleNamespace(compiled=0.0, compiles_since=0.0),  # a rank's `Slots`
)
_contexts = contextlib.ExitStack()  # contexts that are never exited; an unreferenced context would exit immediately


def uses_compile() -> bool:
    """Return True if user code or a preloaded module has called `torch.compile`."""
    return bool(_state.asked)


def watch_compiling(times: Any) -> None:
    """Patch `torch.compile` to record compile time, which extends the run's deadline, in `times`."""
    torch: Any = sys.modules["torch"]
    _state.times = times
    if "torch._inductor.config" in sys.modules and os.environ.items() >= ONE_THREAD.items():
        sys.modules["torch._inductor.config"].compile_threads = 1  # type: ignore[attr-defined]  # env is read on import
    original = torch.compile

    @functools.wraps(original)
    @forwards_calls
    def compile(*args: Any, **kwargs: Any) -> Any:
        is_internal = _is_internal_call(sys._getframe(1), torch)
        _state.asked |= not is_internal
        _compile_started()
        try:  # the first call imports the compiler, which takes seconds
            _apply_to_dynamo()
            compiled = original(*args, **kwargs)
        finally:
            _compile_ended()
        return _under_default_stance(compiled) if is_internal else compiled

    torch.compile = compile


def reset_compile_time() -> None:
    """Reset the recorded compile time to 0."""
    _state.times.compiled = _state.times.compiles_since = 0.0


def run_eagerly() -> None:
    """Run compiled code eagerly in this process from now on."""
    if not _state.eager:  # TorchScript's profiling executor changes to code with different rounding later
        _contexts.enter_context(sys.modules["torch"].jit.optimized_execution(False))
    _state.eager = True
    if "torch._dynamo" in sys.modules:  # a preloaded module may hold compiled functions
        backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})  # private to torch
        _state.asked |= any(map(callable, backends.values()))  # torch itself leaves a None there
        _apply_to_dynamo()


@contextlib.contextmanager
def stance(name: Literal["default", "force_eager"]) -> Iterator[None]:
    """Set the `torch.compiler` stance during a block; no effect before torch 2.6."""
    torch: Any = sys.modules["torch"]
    with contextlib.ExitStack() as stack:
        if hasattr(torch.compiler, "set_stance") and "torch._dynamo" in sys.modules:
            with contextlib.suppress(RuntimeError):  # in a compiled region
                stack.enter_context(torch.compiler.set_stance(name))
        yield


def _apply_to_dynamo() -> None:
    """Register timing callbacks in Dynamo; set the eager stance if eager mode is on."""
    import torch
    import torch._dynamo

    with contextlib.suppress(ImportError, AttributeError):  # private to torch: if missing, no timing
        from torch._dynamo.callback import callback_handler

        if _compile_started not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(_compile_started)
            callback_handler.register_end_callback(_compile_ended)
    if _state.eager and not torch.compiler.is_compiling():
        with contextlib.suppress(AttributeError, RuntimeError):  # needs torch 2.6; fails during a compilation
            torch.compiler.set_stance("force_eager")


def _compile_started(_arguments: Any = None) -> None:
    _state.times.compiles_since = time.monotonic()


def _compile_ended(_arguments: Any = None) -> None:
    _state.times.compiled += time.monotonic() - _state.times.compiles_since
    _state.times.compiles_since = 0.0


def _is_internal_call(caller: FrameType, torch: Any) -> bool:
    """Return True if torch itself called `torch.compile`, such as for flex attention."""
    file = caller.f_code.co_filename
    is_wrapper = caller.f_code.co_name in ("compile", "fn")  # `Module.compile`, and `torch.compile` as a decorator
    return file.startswith(os.path.dirname(torch.__file__) + os.sep) and not is_wrapper


def _under_default_stance(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    @forwards_calls
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _state.eager or sys.modules["torch"].compiler.is_compiling():
            return function(*args, **kwargs)
        with stance("default"):
            return function(*args, **kwargs)

    return run
