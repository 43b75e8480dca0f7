"""Recorders of asynchronous collectives (missing waits, early writes), point-to-point calls, and repeated sums.

`async_op=True` returns a `Work` immediately. Until its `wait()` returns, the tensors belong to the collective (PyTorch
docs, torch.distributed, "Synchronous and asynchronous collective operations").
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.distributed import distributed_c10d

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.evidence.loop import PendingTensorWritten, WorkAwaited, WorkDropped
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_of_program, user_location
from ddpcheck.gather.collectives.collective_log import (
    after_async_collective,
    before_collective,
    replace_functions,
    tensors_of,
)
from ddpcheck.gather.patching import CALLER, Recorder, accompany, guarded, patched
from ddpcheck.gather.state.fingerprints import storage_address, version_counter
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.program_state import program_variables
from ddpcheck.stream.entries import PeerReceived

_WORK_METHODS = (
    *("wait", "get_future", "get_future_result", "is_completed", "is_success", "exception", "result", "synchronize"),
    *("block_current_stream", "boxed"),
)
"""Methods of `Work` by which a script can wait for, or check, completion."""

_INPUTS = ("tensor", "input", "input_tensor")  # arguments read or overwritten; torch itself writes outputs
# returned by coalesced collectives, whose manager holds the handle; private to torch
_COALESCED: Any = getattr(distributed_c10d, "_IllegalWork", ())
_MOST_CHECKS = 64  # checks per line


class _Pending(Struct):
    handle: Any  # weak reference to the `Work`
    operation: str
    location: Location
    on_cpu: bool  # True if all tensors are on the CPU
    tensors: list[weakref.ref[torch.Tensor]]
    places: set[int]  # memory addresses of the tensors
    # (tensor reference, highest version that the collective itself causes) of each argument
    versions: list[tuple[Callable[[], Any], int]]


class WorkRecorder(Recorder, subjects=("collectives",)):
    """Recorder of asynchronous collectives: waits, dropped handles, and writes before a wait.

    Reports each line once. Dropped handles count on CPU only: on a GPU, a later wait in the stream may cover the work.
    """

    def __init__(self, sink: Callable[[Entry], object], are_gradients: Callable[[Collection[int]], bool]) -> None:
        self._sink = sink
        self._are_gradients = are_gradients  # returns True if an optimizer's gradient is at any address
        self._check_counts: Counter[Location] = Counter()
        self._pending: dict[int, _Pending] = {}  # by `id()` of the `Work`
        self._reported: set[Entry] = set()
        self._is_patched = False
        self._versions_before: tuple[int, list[tuple[Callable[[], Any], int]]] = (0, [])  # (arguments' id, versions)
        before_collective.append(guarded(self._record_versions))
        after_async_collective.append(guarded(self._record_start))

    def _record_versions(self, call: Call, call_args: Mapping[str, Any]) -> None:
        """Record tensor versions before the call, during which the backend's thread may write."""
        if call_args.get("async_op") and dist.get_rank(call_args.get("group")) >= 0:  # members of the group only
            tensors, backend = tensors_of(call_args), dist.get_backend(call_args.get("group"))
            result = id(call_args.get("tensor"))
            versions = [  # views share the version counter of their base
                (
                    tensor_ref(tensor),
                    version_counter(tensor) + (id(tensor) == result and _bumps_version(tensor, call, backend)),
                )
                for tensor in map(call_args.get, _INPUTS)
                if isinstance(tensor, torch.Tensor) and not tensor._is_view()
                if all(t._base is not tensor for t in tensors)
            ]
            self._versions_before = (id(call_args), versions)

    def _record_start(self, call: Call, call_args: Mapping[str, Any], work: object) -> None:
        location = Location.parse(call.location)
        tensors = tensors_of(call_args)
        if not tensors or location is None or isinstance(work, _COALESCED) or not _is_of_program(sys._getframe(1)):
            return
        if not self._is_patched:
            self._is_patched = True
            for name in _WORK_METHODS:
                if hasattr(distributed_c10d.Work, name):
                    patched(distributed_c10d.Work, name, self._record_use)
        handle = weakref.ref(work, functools.partial(guarded(self._record_drop), id(work)))
        call_before, versions = self._versions_before
        self._pending[id(work)] = _Pending(
            handle,
            call.operation,
            location,
            all(tensor.device.type == "cpu" for tensor in tensors),
            [*map(weakref.ref, tensors)],
            {*map(storage_address, tensors)},
            versions if call_before == id(call_args) else [],  # else recorded by another thread
        )

    def _record_use(self, work: object, *_arguments: Any, **_named: Any) -> Iterator[None]:
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        self._add(WorkAwaited(pending.location))
        yield  # after wait(), the backend has finished its own writes
        written = [
            ref
            for ref, version in pending.versions
            if (tensor := ref()) is not None and version_counter(tensor) > version
        ]
        if written and self._count_check(pending):
            waits_at = user_location(sys._getframe(CALLER))
            of_gradients = self._are_gradients(pending.places)
            self._add(PendingTensorWritten(pending.operation, pending.location, of_gradients, waits_at))

    def _record_drop(self, number: int, _handle: object) -> None:
        """Report a dropped handle if its CPU tensors are gradients or still referenced."""
        pending = self._pending.pop(number, None)
        if pending is None or not pending.on_cpu or not self._count_check(pending):
            return
        of_gradients = self._are_gradients(pending.places)
        if of_gradients or _is_referenced([tensor for ref in pending.tensors if (tensor := ref()) is not None]):
            self._add(WorkDropped(pending.operation, pending.location, of_gradients))

    def _count_check(self, pending: _Pending) -> bool:
        self._check_counts[pending.location] += 1
        return self._check_counts[pending.location] <= _MOST_CHECKS

    def _add(self, entry: Entry) -> None:
        if entry not in self._reported:
            self._reported.add(entry)
            self._sink(entry)


def _bumps_version(tensor: torch.Tensor, call: Call, backend: str) -> bool:
    """Return True if gloo itself increments the version counter of `tensor` (division or copy)."""
    on_cpu, averages = tensor.device.type == "cpu", "AVG" in call.payload.split(", ")
    return (on_cpu or "nccl" not in backend) and (averages or not on_cpu or tensor.layout != torch.strided)


def _is_referenced(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if a program variable, container or module refers to a tensor."""
    tensor_ids = set(map(id, tensors))
    for _, value, _ in program_variables(depth=1) if tensor_ids else ():
        objects: Iterable[object] = (value,)
        if type(value) in (list, tuple, dict):
            objects = list(value.values() if type(value) is dict else value)
        elif issubclass(type(value), nn.Module):
            objects = itertools.chain(nn.Module.buffers(value), nn.Module.parameters(value))
        if not tensor_ids.isdisjoint(map(id, objects)):
            return True
    return False


def _is_of_program(frame: FrameType | None) -> bool:
    """Return True if the script itself called the patched function, not a package."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ddpcheck."):
        frame = frame.f_back
    return frame is not None and is_of_program(frame.f_code.co_filename)


_ASYNCHRONOUS = ("isend", "irecv")  # return a `Work` to wait for
_RECEIVES = ("recv", "irecv")


class PeerRecorder(Recorder, subjects=("collectives",)):
    """Recorder of point-to-point calls: waits for a peer, and senders of received tensors."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._log = run.log
        self._received: set[PeerReceived] = set()
        self._works: WeakKeyDictionary[Any, PeerWait] = WeakKeyDictionary()
        self._is_waiting = False  # inside a recorded wait: nested waits are not recorded
        replace_functions(("send", "recv", *_ASYNCHRONOUS), self._recorded_function)
        patched(distributed_c10d.Work, "wait", self._record_wait)

    def _recorded_function(self, name: str, original: Any) -> Any:
        parameters = tuple(inspect.signature(original).parameters)

        def record_call(*arguments: Any, **named: Any) -> Generator[None, Any, None]:
            bound = {**dict(zip(parameters, arguments, strict=False)), **named}
            wait = PeerWait(name, _peer_of(bound), int(bound.get("tag") or 0), str(user_location() or ""))
            if name in _RECEIVES:
                received = PeerReceived(wait.peer, self._run.steps > 0)
                if received not in self._received:
                    self._received.add(received)
                    self._log.add(received)
            if name in _ASYNCHRONOUS:
                work = yield
                if work is not None:
                    self._works[work] = wait
            else:
                yield from self._log_wait(wait)
            self._log.waited |= name in _RECEIVES

        return accompany(original, record_call)

    def _record_wait(self, work: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        wait = self._works.get(work)
        if wait is None:
            yield
        else:
            yield from self._log_wait(wait)

    def _log_wait(self, wait: PeerWait) -> Generator[None, Any, None]:
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        self._log.wait_for(wait)
        try:
            yield
        finally:
            self._is_waiting = False
            self._log.wait_for(None)


def _peer_of(call_args: Mapping[str, Any]) -> int:
    """Return the global rank of the peer; -1 for a receive from any rank."""
    peer = next((rank for key in ("dst", "src") if (rank := call_args.get(key)) is not None), None)
    if peer is not None:
        return int(peer)
    group_rank = next((rank for key in ("group_dst", "group_src") if (rank := call_args.get(key)) is not None), None)
    group: Any = call_args.get("group") or dist.group.WORLD
    return -1 if group_rank is None else dist.get_global_rank(group, int(group_rank))


_MOST_SUM_ELEMENTS = 8  # of an all_reduce whose values are read
_MOST_CALLS = 64  # max recorded calls of a line
_MOST_SUM_LINES = 64  # lines of all_reduce
_CALLS_PER_ENTRY = 4  # per entry: consecutive calls whose input includes the previous result

_Numbers = tuple[float, ...]


@dataclass(slots=True)
class _SumLine:
    calls: int = 0
    inputs: list[_Numbers] = field(default_factory=list)  # of consecutive calls, each including the last result
    results: list[_Numbers] = field(default_factory=list)


class SumRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of repeated all_reduces whose inputs may include earlier results: one entry per line."""

    def __init__(self, sink: Callable[[SumsReduced], object]) -> None:
        self._sink = sink
        self._lines: dict[tuple[str, int], _SumLine] = {}

    def note_input(self, call: Call, call_args: Mapping[str, Any]) -> None:
        line = self._line_of(call, call_args)
        if line is None:
            return
        numbers = _numbers(call_args["tensor"])
        if not line.results or any(a < b for a, b in zip(numbers, line.results[-1], strict=True)):
            line.inputs, line.results = [], []
        line.inputs.append(numbers)

    def note_output(self, call: Call, call_args: Mapping[str, Any]) -> None:
        line = self._line_of(call, call_args)
        if line is None or len(line.inputs) <= len(line.results):
            return
        line.calls += 1
        line.results.append(_numbers(call_args["tensor"]))
        if len(line.results) == _CALLS_PER_ENTRY:
            self._sink(SumsReduced(Location.parse(call.location), tuple(line.inputs), tuple(line.results)))
            line.calls = _MOST_CALLS

    def _line_of(self, call: Call, call_args: Mapping[str, Any]) -> _SumLine | None:
        tensor, op = call_args.get("tensor"), call_args.get("op", dist.ReduceOp.SUM)
        if call.operation != "all_reduce" or not isinstance(tensor, torch.Tensor) or op != dist.ReduceOp.SUM:
            return None
        if call_args.get("async_op") or len(call.members) < dist.get_world_size() or tensor.requires_grad:
            return None
        key = call.location, tensor.numel()
        if not 0 < tensor.numel() <= _MOST_SUM_ELEMENTS or tensor.is_complex() or tensor.layout != torch.strided:
            return None
        if key not in self._lines and len(self._lines) >= _MOST_SUM_LINES:
            return None
        line = self._lines.setdefault(key, _SumLine())
        return line if line.calls < _MOST_CALLS else None


def _numbers(tensor: torch.Tensor) -> _Numbers:
    return tuple(map(float, tensor.detach().flatten().tolist()))
