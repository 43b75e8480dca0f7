"""Log of collectives called by user code on a rank.

Every rank writes a line before it enters a collective, so the log survives a hang, an abort and a kill;
`ddpcheck.rules.collectives` compares the logs of the ranks. Collectives of the DDP reducer in C++ are not
logged: a rank that waits in one is located by its place ("step 1: backward").
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec import structs

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.source_lines import frames_from, user_line_and_program_lines, user_location
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.gather.collectives.groups import Group, named_group, record_group
from ddpcheck.gather.patching import Patch, Recorder, guarded
from ddpcheck.stream.entries import JOINED, JOINING
from ddpcheck.worlds import rank as this_rank

_MATCHED_BY_PAYLOAD = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    "reduce_scatter",
)
_MATCHED_BY_NAME = (
    "reduce_scatter_single",
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "all_gather_coalesced"),
    *("all_reduce_coalesced", "new_group"),
)
COLLECTIVES = (*_MATCHED_BY_PAYLOAD, *_MATCHED_BY_NAME)
"""Functions of `torch.distributed` that all ranks of a group have to call."""

_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # these overwrite argument `tensor`
_POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list")  # waits are recorded, calls not matched
_FUNCTIONAL = (  # of torch.distributed._functional_collectives
    *("all_reduce", "broadcast", "all_gather_tensor", "all_gather_single", "reduce_scatter_tensor", "permute_tensor"),
    *("reduce_scatter_single", "all_to_all_single", "all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)
_FUNCTIONAL_OPERATORS = (  # of torch.ops._c10d_functional
    *("all_reduce", "all_reduce_", "broadcast", "broadcast_", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor_coalesced", "all_gather_into_tensor_out", "wait_tensor"),
)


def log_path(directory: Path, rank: int) -> Path:
    return directory / f"collectives-{rank}.log"


def read_log(directory: Path, rank: int) -> list[Call]:
    """Return the collective calls that `rank` has entered so far."""
    try:
        text = log_path(directory, rank).read_text()
    except FileNotFoundError:
        return []
    calls = []
    for line in text.splitlines():
        try:
            calls.append(msgspec.convert(json.loads(line), Call))
        except ValueError:
            break  # incomplete line: the rank died while writing
    return calls


class _ThreadState(threading.local):
    """State of a thread: nesting depth of `without_logging`, and function that replaces collectives."""

    depth = 0
    stub: CollectiveStub | None = None


_thread = _ThreadState()

CollectiveStub = Callable[[str, Mapping[str, Any], Call], Any]
"""Replacement of a collective: takes its name, arguments by name and description, and returns its result."""


@contextlib.contextmanager
def replace_collectives(stub: CollectiveStub) -> Iterator[None]:
    """Call `stub` in place of each collective of this thread in the block."""
    _thread.stub = stub
    try:
        yield
    finally:
        _thread.stub = None


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Exclude ddpcheck's own collectives, called by this thread in the block, from the log."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def in_collective() -> bool:
    """Return True inside a logged collective or a block of `without_logging`."""
    return bool(_thread.depth)


def record_collectives(directory: Path, rank: int) -> None:
    """Start logging collectives of this process; call before importing user code."""
    file = os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(call: Call) -> None:
        with contextlib.suppress(OSError):  # disk full: continue, a hang report will list fewer calls
            os.write(file, (json.dumps(structs.asdict(call)) + "\n").encode())

    record_calls(write)


def record_calls(sink: Callable[[Call], object], on_enter_exit: Callable[..., object] | None = None) -> None:
    """Start calling `sink` with each collective of this process, before the collective runs.

    `on_enter_exit(begins=True)` is called before each collective and `Work.wait`, `on_enter_exit(begins=False)` after.
    """
    import torch
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import distributed_c10d

    global _sink, _on_enter_exit
    _sink, _on_enter_exit = guarded(sink, _calls), on_enter_exit
    replace_functions(COLLECTIVES, log_calls)
    replace_functions(_POINT_TO_POINT, functools.partial(log_calls, matched=False))
    for name in (*_FUNCTIONAL, *(f"{name}_autograd" for name in _FUNCTIONAL)):
        if hasattr(functional, name):
            Patch(functional, name, functools.partial(log_calls, name, functional=True))
    _record_operators(torch)
    Patch(distributed_c10d.Work, "wait", _wrap_wait)


def replace_functions(names: Iterable[str], make: Callable[[str, Any], Any]) -> contextlib.ExitStack:
    """Replace functions of `torch.distributed` by `make(name, function)`; closing the stack restores them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    stack = contextlib.ExitStack()
    for name in names:
        if (original := getattr(distributed_c10d, name, None)) is not None:
            wrapped = make(name, original)
            for holder in (distributed_c10d, dist):
                if getattr(holder, name, None) is original:
                    stack.enter_context(Patch(holder, name, lambda _original: wrapped))  # noqa: B023 - called at once
    return stack


class _CallRecorder(Recorder, subjects=("collectives",)):
    """Recorder of collective calls, which stops at the first error."""


_calls = _CallRecorder()
_sink: Callable[[Call], object] | None = None
_on_enter_exit: Callable[..., object] | None = None
before_collective: list[Callable[[Call, Mapping[str, Any]], object]] = []
"""Called with the arguments of each collective, before it runs."""
after_overwriting_collective: list[Callable[[Call, Mapping[str, Any]], object]] = []
"""Called with the arguments of each collective that overwrote `tensor`."""
after_async_collective: list[Callable[[Call, Mapping[str, Any], object], object]] = []
"""Called with the arguments and the handle of each asynchronous collective."""


def log_ddp_collective(
    operation: str, payload: str, group: Any = None, *, known: Group | None = None, call_place: str = ""
) -> None:
    """Log a collective that DDP will start in C++, unseen by wrapped functions.

    `payload`: text on the tensors or the mode, for the log. `known`: result of `named_group`, if computed before.
    """
    if _sink is not None and not _thread.depth:
        name, members, description = known or named_group(group)
        call_place = call_place or this_rank.current_slots().status
        location, lines = user_line_and_program_lines(sys._getframe(1))
        _sink(Call(operation, name, members, payload, call_place, location, callers=lines, group_words=description))


@contextlib.contextmanager
def _mark_waiting(collective: str) -> Iterator[None]:
    """Mark this rank as waiting in `collective` during the block, for deadlock detection."""
    this_rank.set_collective(collective)
    if _on_enter_exit is not None:
        _on_enter_exit(begins=True)
    try:
        yield
    finally:
        this_rank.set_collective("")
        if _on_enter_exit is not None:
            _on_enter_exit(begins=False)


_kernels: list[Any] = []  # torch libraries: deleting one removes its kernels


def _record_operators(torch: Any) -> None:
    """Log functional collectives called as torch operators.

    A kernel per device overrides torch's CompositeExplicitAutograd kernel and calls it. `torch.ops` stays unchanged,
    and tracing (compilation) never reaches a kernel. Private to torch: if unavailable, such calls run unlogged.
    """
    with contextlib.suppress(AttributeError, RuntimeError, ImportError):
        library = torch.library.Library("_c10d_functional", "IMPL")
        fallback_key = torch._C.DispatchKey.CompositeExplicitAutograd
        for name in _FUNCTIONAL_OPERATORS:
            operator: Any = getattr(torch.ops._c10d_functional, name, None)
            if operator is None:
                continue
            original: Any = functools.partial(operator.default._op_dk, fallback_key)
            if name == "wait_tensor":
                kernel = _wrap_wait(original)
            else:
                parameters = tuple(argument.name for argument in operator.default._schema.arguments)
                kernel = log_calls(name, original, functional=True, parameters=parameters)
            for device in ("CPU", "CUDA"):
                library.impl(name, kernel, device)
        _kernels.append(library)


def _wrap_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def wait(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _thread.depth or this_rank.current_slots().collective:
            return original(*args, **kwargs)
        with _mark_waiting(f"wait() at {user_location(sys._getframe(1))}"):
            return original(*args, **kwargs)

    return wait


def log_calls(
    name: str,
    original: Callable[..., Any],
    *,
    matched: bool = True,  # all ranks of the group have to call the function
    functional: bool = False,  # a function of `_functional_collectives`, or an operator
    parameters: tuple[str, ...] = (),  # argument names; default: from the signature
) -> Callable[..., Any]:
    """Wrap `original`, function `name` of `torch.distributed`, to log each call."""
    import torch

    operation = name.removesuffix("_").removesuffix("_autograd") if functional else name
    parameters = parameters or tuple(inspect.signature(original).parameters)

    @functools.wraps(original)
    @forwards_calls
    def call_logged(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _thread.depth:
            return original(*args, **kwargs)
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if name == "new_group" and arguments.get("use_local_synchronization"):
            result = original(*args, **kwargs)  # only the members call it
            _guarded_record_group(result, str(user_location(sys._getframe(1)) or ""))
            return result
        backward = functional and (name.endswith("_autograd") or _has_backward(name))
        call = _guarded_describe(operation, arguments, backward=backward)
        if call is None:
            return original(*args, **kwargs)
        if _thread.stub is not None:
            return _thread.stub(operation, arguments, call)
        if matched and _sink is not None:
            _sink(call)
            for sink in before_collective:
                sink(call, arguments)
        with _mark_waiting(str(call)), without_logging():
            result = original(*args, **kwargs)
        if name == "new_group":
            _guarded_record_group(result, call.location)
        for sink in after_overwriting_collective if name in _IN_PLACE else ():
            sink(call, arguments)
        if matched and arguments.get("async_op") and result is not None:
            for started in after_async_collective:
                started(call, arguments, result)
        return result

    return call_logged


_KERNELS = {"all_gather_tensor": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor"}
_KERNELS |= {"reduce_scatter_single": "reduce_scatter_tensor"}


@functools.cache
def _has_backward(name: str) -> bool:
    """Return True if a functional collective is differentiable; private to torch, default False."""
    import torch

    base = name.removesuffix("_coalesced")
    operator = _KERNELS.get(base, base) + name[len(base) :]
    with contextlib.suppress(AttributeError, RuntimeError):
        ask: Any = torch._C._dispatch_has_kernel_for_dispatch_key
        return bool(ask(f"_c10d_functional::{operator}", "Autograd"))
    return False


def tensors_of(kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors in the arguments of a collective, including lists of tensors."""
    import torch

    nested = [item for value in kwargs.values() if isinstance(value, list | tuple) for item in value]
    return [value for value in (*kwargs.values(), *nested) if isinstance(value, torch.Tensor)]


_OPS = ("op", "reduceOp", "reduce_op")  # argument names of the reduce operation


def _describe_call(name: str, kwargs: Mapping[str, Any], *, backward: bool) -> Call:
    import torch

    from ddpcheck.gather.autograd.exchanges import running_functions

    tensors, payload = tensors_of(kwargs), []
    if name in _MATCHED_BY_PAYLOAD and tensors:
        first = kwargs["tensor"] if isinstance(kwargs.get("tensor"), torch.Tensor) else tensors[0]
        payload.append(f"{str(first.dtype).removeprefix('torch.')} of shape {tuple(first.shape)}")
    if name == "new_group":
        payload.append("all ranks" if kwargs.get("ranks") is None else f"ranks {sorted(kwargs['ranks'])}")
    if (op := next((kwargs[key] for key in _OPS if kwargs.get(key) is not None), None)) is not None:
        kind = str(getattr(getattr(op, "op", op), "name", op)).upper()
        payload += [kind] if kind != "SUM" else []
    root = next((kwargs[key] for key in ("src", "dst", "group_src", "group_dst") if kwargs.get(key) is not None), None)
    if root is not None:
        payload.append(f"root {root}")
    group = named_group(None if name == "new_group" else kwargs.get("group", kwargs.get("group_name")))
    location, lines = user_line_and_program_lines(sys._getframe(3))
    carries = any(tensor.requires_grad for tensor in tensors)
    return Call(
        operation=name,
        group=group[0],
        members=group[1],
        payload=", ".join(payload),
        place=_place_in_join(sys._getframe(3)) or this_rank.current_slots().status,
        location=location,
        elements=max((tensor.numel() for tensor in tensors if tensor.is_floating_point()), default=0),
        carries_gradient=carries,
        differentiable=(backward and carries) or bool(running_functions(sys._getframe(3))),
        callers=lines,
        group_words=group[2],
    )


_guarded_describe, _guarded_record_group = guarded(_describe_call, _calls), guarded(record_group, _calls)
_JOIN_MODULE, _DDP_MODULE = "torch.distributed.algorithms.join", "torch.nn.parallel.distributed"
_MOST_FRAMES_OF_JOIN = 8


def _place_in_join(frame: FrameType | None) -> str:
    """Return `JOINED` inside `Join.__exit__` (no batches left), `JOINING` elsewhere in `Join`, else ''."""
    modules = []
    for caller in itertools.islice(frames_from(frame), _MOST_FRAMES_OF_JOIN):
        module = caller.f_globals.get("__name__", "")
        if module == _JOIN_MODULE and caller.f_code.co_name == "__exit__":
            return JOINED
        if not module.startswith("ddpcheck."):
            modules.append(module)
    return JOINING if modules and modules[0] in (_JOIN_MODULE, _DDP_MODULE) else ""
