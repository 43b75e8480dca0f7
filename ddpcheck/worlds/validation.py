"""Validation of world options and tasks before a process starts."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import ChoiceError, UsageError, WrongTypeError
from ddpcheck.worlds import wire

if TYPE_CHECKING:
    from ddpcheck.worlds.launchers.leader import Leader

MAX_WORLD_SIZE = 1024
BACKENDS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")


def check_count(name: str, value: object, most: int) -> None:
    """Raise `UsageError` unless `value` is an int from 1 to `most`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int) or not is_number or not 1 <= value <= most:
        kind = UsageError if is_number else WrongTypeError
        raise kind(f"{name} must be a whole number from 1 to {most}, got {value!r}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ChoiceError` unless `value` is one of the choices."""
    if value not in choices:
        raise ChoiceError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.")


def check_seconds(name: str, value: object) -> None:
    """Raise `UsageError` unless `value` is a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, (int, float)) or not is_number or not 0 < value < math.inf:
        kind = UsageError if is_number else WrongTypeError
        raise kind(f"{name} must be a number of seconds above 0, got {value!r}.")


def check_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the module names as a tuple; raise `UsageError` if invalid."""
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise WrongTypeError(f"preload must be a list of names of modules, got {modules!r}.")
    for module in modules:
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"preload must hold names of modules such as 'transformers', got {module!r}.")
    return tuple(modules)


@dataclasses.dataclass(slots=True)
class WorldOptions:
    """Options of a `World`, also for ranks started by a launcher.

    Attributes:
        hash_seeds: Use different hash seeds on even and odd ranks, as under a launcher, so that the order of a set of
            strings differs; needs a second fork server. The user's `PYTHONHASHSEED` wins.
        watch: Function of (world, finished ranks, unfinished ranks), called every 0.25 s during a run. A sentence that
            it returns ends the run with a `HangError`. The time in the function does not count towards the timeout.
        ahead: The ranks are not needed yet; they may start late, after more imports in the fork server.
        hosts: Processes started by a launcher, each of which starts one rank.

    Raises:
        UsageError: An option is invalid.
    """

    world_size: int = 2
    backend: str = "gloo"
    device: str = "cpu"
    timeout: float = 30.0
    startup_timeout: float = 120.0
    start_method: str | None = None
    process_group: bool = True
    threads: int | None = None
    env: Mapping[str, str] | None = None
    preload: Sequence[str] = ()
    hash_seeds: bool = False
    watch: Callable[..., str | None] | None = None
    ahead: bool = False
    hosts: Leader | None = None

    def __post_init__(self) -> None:
        check_count("world_size", self.world_size, MAX_WORLD_SIZE)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("device", self.device, DEVICES)
        check_seconds("timeout", self.timeout)
        check_seconds("startup_timeout", self.startup_timeout)
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError("backend 'nccl' works on GPUs only; pass device='cuda', or backend='gloo'.")
        if not self.process_group and self.world_size != 1:
            raise UsageError(
                f"process_group=False needs world_size=1, got {self.world_size}; ranks of a larger world need one."
            )
        if self.threads is not None:
            check_count("threads", self.threads, MAX_WORLD_SIZE)
        self.start_method = _choose_start_method(self.start_method)
        self.env = dict(self.env or {})
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise WrongTypeError(f"env must map strings to strings, got {key!r}: {value!r}; write numbers as text.")
        self.preload = check_modules(self.preload)


def _choose_start_method(method: str | None) -> str:
    if sys.platform == "win32":
        raise UsageError("ddpcheck cannot start ranks on Windows; run it on Linux or macOS, or under WSL.")
    if method is None:
        return "fork" if sys.platform == "linux" else "spawn"
    check_choice("start_method", method, ("fork", "spawn"))
    if method == "fork" and sys.platform != "linux":
        raise UsageError("start_method 'fork' works on Linux only; use 'spawn' here.")
    return method


def cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(world_size: int) -> int:
    """Return the threads per rank: cores / (ranks * pytest-xdist workers), at least 1."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return max(1, cores() // (world_size * max(1, int(workers) if workers.isdecimal() else 1)))


def pack_task(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whose: str = "World.run") -> bytes:
    """Pickle a function and its arguments; raise `UsageError` that names an unpicklable argument."""
    if not callable(fn):
        raise WrongTypeError(f"The first argument of {whose} must be a function, got {type(fn).__qualname__}.")
    try:
        return wire.dumps((fn, args, kwargs))
    except Exception as error:
        named: dict[str, Any] = {"The function": fn}
        named |= {f"Argument {index}": value for index, value in enumerate(args)}
        named |= {f"Argument {key!r}": value for key, value in kwargs.items()}
        for name, value, reason in wire.unsendable(named):
            subject = _unpicklable_field(value) or f"{name} of {whose}, a {type(value).__qualname__},"
            raise UsageError(
                f"{subject} cannot be sent to the ranks "
                f"({type(reason).__name__}: {reason}); make it inside the function that runs there."
            ) from error
        raise UsageError(f"The arguments of {whose} cannot be sent to the ranks ({error}).") from error


def _unpicklable_field(value: object) -> str:
    """Name an unpicklable field of a dataclass, "loss of the Recipe"; '' if none."""
    if isinstance(value, partial):
        return next(filter(None, map(_unpicklable_field, (*value.args, *value.keywords.values()))), "")
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    failed = wire.unsendable({field.name: getattr(value, field.name) for field in fields})
    return next((f"{name} of the {type(value).__qualname__}" for name, _, _ in failed), "")
