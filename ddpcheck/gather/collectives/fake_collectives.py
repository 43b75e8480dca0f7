"""Run collectives on a single rank, as if all ranks passed the same values."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.gather.collectives.collective_log import COLLECTIVES, replace_functions

_Work: Any = dist.distributed_c10d.Work


class CompletedWork(_Work):  # type: ignore[misc]
    """Work handle of a completed collective."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


@forwards_calls
def answer_locally(operation: str, kwargs: Mapping[str, Any]) -> Any:
    """Compute a collective's result as if all ranks passed equal values; fill output arguments."""
    tensor = kwargs.get("self", kwargs.get("input", kwargs.get("inputs", kwargs.get("tensor"))))
    if "output" not in kwargs and "tensor_list" not in kwargs and ("self" in kwargs or "group_name" in kwargs):
        size = int(kwargs.get("group_size", 1))
        if "gather" in operation and isinstance(tensor, torch.Tensor):
            return torch.cat([tensor] * (size or 1), int(kwargs.get("gather_dim", 0)))
        return tensor
    with torch.no_grad():
        for target in kwargs.get("tensor_list") or kwargs.get("gather_list") or ():
            target.copy_(tensor)
        for index, _ in enumerate(kwargs.get("object_list") or () if operation == "all_gather_object" else ()):
            kwargs["object_list"][index] = kwargs.get("obj")
    return CompletedWork() if kwargs.get("async_op") else None


class CommunicatesError(Exception):
    """Raised if code for a single rank calls a collective that cannot be simulated."""


class _NoCommunication(TorchDispatchMode):
    """Mode that raises `CommunicatesError` for collectives called as torch operators."""

    @forwards_calls
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CommunicatesError(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_collectives() -> Iterator[None]:
    """Run the block without other ranks: replace collectives by `answer_locally`, or raise `CommunicatesError`."""

    def make_answer(name: str, original: Any) -> Any:
        parameters = tuple(inspect.signature(original).parameters)

        @functools.wraps(original)
        @forwards_calls
        def answer(*args: Any, **kwargs: Any) -> Any:
            return answer_locally(name, {**dict(zip(parameters, args, strict=False)), **kwargs})

        return answer

    with replace_functions(COLLECTIVES, make_answer), _NoCommunication():  # type: ignore[no-untyped-call]
        yield
