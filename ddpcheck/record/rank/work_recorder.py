"""Asynchronous collectives of the script: whether their results are waited for, and what is written before that.

`async_op=True` returns a `Work` at once. Until its `wait()` returns, the tensors belong to the collective (PyTorch
docs, torch.distributed, "Synchronous and asynchronous collective operations").
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from msgspec import Struct
from torch.distributed import distributed_c10d

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.loop import TensorOfWorkWritten, WorkDropped, WorkUsed
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_of_program, user_frame, user_location, variables_of
from ddpcheck.gather.collectives.collective_log import record_started, tensors_of
from ddpcheck.gather.patching import CALLER, guarded, patched
from ddpcheck.gather.state.fingerprints import version_of
from ddpcheck.gather.state.tensor_file import tensor_ref

_WAYS = (
    *("wait", "get_future", "get_future_result", "is_completed", "is_success", "exception", "result", "synchronize"),
    *("block_current_stream", "boxed"),
)
"""Methods of a `Work` by which a script may learn that it is done."""

_GIVEN = ("tensor", "input", "input_tensor")  # what a collective overwrites or reads; outputs torch writes itself
_MOST_TOLD = 64  # times that a line is looked at


class _Pending(Struct):
    """A collective that has been started, and not waited for."""

    handle: Any  # a weak reference
    operation: str
    location: Location
    on_cpu: bool  # whether its tensors are there
    tensors: list[weakref.ref[torch.Tensor]]
    places: set[int]  # the addresses of its tensors
    versions: list[tuple[Callable[[], Any], int]]  # of what was given to it, when it was started


class WorkRecorder:
    """Hands `sink` each line whose collectives are waited for, dropped, or whose tensors are written before that.

    Each once: a line may start a collective in every step.
    """

    def __init__(self, sink: Callable[[Entry], object], are_gradients: Callable[[Collection[int]], bool]) -> None:
        """Begin; `are_gradients` says whether any of the addresses is that of a gradient of what optimizers hold."""
        self._sink = sink
        self._are_gradients = are_gradients
        self._told_of: Counter[Location] = Counter()
        self._pending: dict[int, _Pending] = {}  # by the identity of the handle
        self._told: set[Entry] = set()
        self._follows = False
        record_started(guarded(self._started))

    def _started(self, call: Call, given: Mapping[str, Any], work: object) -> None:
        where = Location.parse(call.location)
        tensors = tensors_of(given)
        if not tensors or where is None or not _is_of_program(sys._getframe(1)):
            return
        if not self._follows:
            self._follows = True
            for name in _WAYS:
                if hasattr(distributed_c10d.Work, name):
                    patched(distributed_c10d.Work, name, self._uses)
        handle = weakref.ref(work, functools.partial(guarded(self._dropped), id(work)))
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        whole = (one for one in map(given.get, _GIVEN) if isinstance(one, torch.Tensor) and not one._is_view())
        versions = [(tensor_ref(tensor), version_of(tensor)) for tensor in whole]  # all views of one have it in common
        places = {tensor.data_ptr() for tensor in tensors}
        self._pending[id(work)] = _Pending(
            handle, call.operation, where, on_cpu, [*map(weakref.ref, tensors)], places, versions
        )

    def _uses(self, work: object, *_arguments: Any, **_named: Any) -> None:
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        self._add(WorkUsed(pending.location))
        for ref, version in pending.versions:
            if (tensor := ref()) is not None and version_of(tensor) != version:
                waits_at = user_location(sys._getframe(CALLER))
                self._tell(TensorOfWorkWritten, pending, waits_at)

    def _dropped(self, number: int, _handle: object) -> None:
        """What no variable refers to may be read by nobody. On a GPU, a later wait in the stream may be for it, too."""
        pending = self._pending.pop(number, None)
        if pending is None or not pending.on_cpu:
            return
        alive = [tensor for one in pending.tensors if (tensor := one()) is not None]
        if _are_held(alive, user_frame(sys._getframe())) or self._are_gradients(pending.places):
            self._tell(WorkDropped, pending)

    def _tell(self, kind: Callable[..., Entry], pending: _Pending, *more: object) -> None:
        self._told_of[pending.location] += 1
        if self._told_of[pending.location] <= _MOST_TOLD:  # the first are before optimizers are known
            of_gradients = self._are_gradients(pending.places)
            self._add(kind(pending.operation, pending.location, of_gradients, *more))

    def _add(self, entry: Entry) -> None:
        if entry not in self._told:
            self._told.add(entry)
            self._sink(entry)


def _are_held(tensors: Sequence[torch.Tensor], frame: FrameType | None) -> bool:
    """Whether a variable of the program refers to a tensor, or an object or a container that is one."""
    for value in () if frame is None else [*variables_of(frame).values()]:
        inside = value if isinstance(value, list | tuple) else vars(value) if hasattr(value, "__dict__") else value
        within = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, list | tuple) else ()
        if any(one is tensor for one in (value, *within) for tensor in tensors):
            return True
    return False


def _is_of_program(frame: FrameType | None) -> bool:
    """Whether the script itself has called the function in whose place ours stands, and no package, or torch."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ddpcheck."):
        frame = frame.f_back
    return frame is not None and is_of_program(frame.f_code.co_filename)
