"""Pool of worlds: prefetched, reused, closed in the background."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from typing import Any

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.harness import World, start_world
from ddpcheck.worlds import starting, validation

_START_VARIABLES = tuple(  # prefixes of variables read at the start of a process, thread pool or process group
    "ATEN_ C10_ CUDA_ GLOO_ GOMP_ KMP_ LD_ MALLOC_ MKL_ NCCL_ NVIDIA_ OMP_ OPENBLAS_ PYTHON PYTORCH_ TORCH".split()
)
_CHANGEABLE = ("timeout", "startup_timeout", "env", "watch")  # options that can be changed on a running world
_RESET_SECONDS = 1.0  # seconds to reset a process group; fresh ranks take less
_MOST_CLOSING = 4  # maximum number of worlds closing at the same time

Kind = Hashable  # worlds of equal kind are interchangeable


def _kind_of(options: Mapping[str, Any]) -> Kind:
    """Validate options; return a key of options and environment that running worlds cannot change."""
    checked = validation.WorldOptions(**options)
    env = checked.env or {}
    environment = {**starting.inherited_environment(), **env}
    early_vars = frozenset(item for item in environment.items() if item[0].startswith(_START_VARIABLES))
    fixed = {field.name: getattr(checked, field.name) for field in fields(checked) if field.name not in _CHANGEABLE}
    fixed["threads"] = checked.threads or validation.threads(checked.world_size)
    return repr(fixed), early_vars, frozenset(name for name in env if name.startswith(_START_VARIABLES))


class WorldPool:
    """Owner of all worlds of a test process; not thread-safe.

    `options` are keyword options of `WorldOptions`; an invalid option raises `UsageError`. The user of a leased world
    may close the world.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._leased: dict[World, tuple[Hashable, Kind]] = {}  # key in `_idle`
        self._idle: dict[tuple[Hashable, Kind], list[World]] = {}  # by (owner, kind); the spare has owner `None`
        self._closing: deque[World] = deque()

    def acquire(self, *, owner: Hashable = None, following: Mapping[str, Any] | None = None, **options: Any) -> World:
        """Return the owner's world (process group reset), the spare world, or a new world.

        An owner is, for example, a test module; `end` closes the worlds of an owner. A world of an owner is replaced if
        it failed, was released as broken, or does not reset its process group in time. Without an owner, a spare world
        is started for the next lease, which has the options `following` (`None`: no spare, as a start takes CPU time).
        """
        self._refresh()
        key = owner, _kind_of(options)
        idle = self._idle.setdefault(key, [])
        spares = self._idle.get((None, key[1]), [])
        world = None
        while world is None and (idle or spares):
            must_be_ready = owner is not None and bool(idle)  # a spare may still start
            candidate = (idle or spares).pop()
            with contextlib.suppress(DDPCheckError):
                if candidate.wait_ready(_RESET_SECONDS) if must_be_ready else candidate.usable:
                    candidate.update_options(**{name: options[name] for name in _CHANGEABLE if name in options})
                    world = candidate
            if world is None:
                self._begin_close(candidate)
        world = world or start_world(**options)
        self._leased[world] = key
        if owner is None:
            self._prefetch(following)
        return world

    def release(self, world: World, *, broken: bool = False) -> None:
        """Take a world back without waiting; `broken` worlds are not reused.

        A world with an owner resets its process group; a world without an owner is closed in the background.
        """
        self._refresh()
        key = self._leased.pop(world, None)
        if key is None or key[0] is None or broken or key not in self._idle:
            self._begin_close(world)
            return
        try:
            world.reset_process_group()
        except DDPCheckError:  # failed, closed or still running
            self._begin_close(world)
        else:
            self._idle[key].append(world)

    def end(self, owner: Hashable) -> None:
        """Close an owner's idle worlds now; worlds in use are closed when released."""
        self._refresh()
        self._close_idle(lambda key: key[0] == owner)

    def close(self) -> None:
        """Close every world, including leased worlds, and wait until all ranks have exited."""
        self._refresh()
        self._close_idle(lambda key: True)
        for world in self._leased:
            self._begin_close(world)
        self._leased.clear()
        while self._closing:
            self._closing.popleft().close()

    def _prefetch(self, options: Mapping[str, Any] | None) -> None:
        """Start a spare world with these options, if any, and close other spares."""
        kind = None
        with contextlib.suppress(UsageError):  # reported by the test that needs the world
            kind = None if options is None else _kind_of(options)
        self._close_idle(lambda key: key[0] is None and key[1] != kind)
        if options is not None and kind is not None and not self._idle.get((None, kind)):
            with contextlib.suppress(DDPCheckError):
                self._idle[None, kind] = [start_world(**options, ahead=True)]

    def _close_idle(self, is_closed: Callable[[tuple[Hashable, Kind]], bool]) -> None:
        for key in list(filter(is_closed, self._idle)):
            for world in self._idle.pop(key):
                self._begin_close(world)

    def _begin_close(self, world: World) -> None:
        world.begin_close()
        if not world.closed:
            self._closing.append(world)

    def _refresh(self) -> None:
        """Empty the pool in a forked process, and close worlds whose ranks have exited."""
        if self._pid != os.getpid():  # fork: the worlds belong to the parent process
            WorldPool.__init__(self)
        for _ in range(len(self._closing)):
            world = self._closing.popleft()
            if world.has_exited or len(self._closing) >= _MOST_CLOSING:
                world.close()
            else:
                self._closing.append(world)
