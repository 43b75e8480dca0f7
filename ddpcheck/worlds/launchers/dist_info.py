"""Which rank this process is, and functions that only the first one carries out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ddpcheck.findings.errors import WrongTypeError

P = ParamSpec("P")
R = TypeVar("R")


def get_dist_info(group: Any = None) -> tuple[int, int]:
    """Rank and world size; (0, 1) without a process group, and (-1, -1) on a rank that is not in `group`.

    Args:
        group: Process group; default: all ranks.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def master_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function or method so that rank 0 alone carries it out; on every other rank it returns `None`.

    Which rank this is is asked at each call; without a process group, it is rank 0. The other ranks do not wait for it:
    call `torch.distributed.barrier()` where they need what it has done, and no collective inside. A coroutine function
    stays one.

    Raises:
        UsageError: This is no function.
    """
    if not callable(function):
        below = "; put it below @classmethod or @property" if isinstance(function, (classmethod, property)) else ""  # type: ignore[unreachable]
        raise WrongTypeError(f"master_only decorates a function or method, got {function!r}{below}.")
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await function(*args, **kwargs) if get_dist_info()[0] == 0 else None

        return later  # type: ignore[return-value]  # a coroutine of what it would have been one of

    @wraps(function)
    def on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if get_dist_info()[0] == 0 else None

    return on_master
