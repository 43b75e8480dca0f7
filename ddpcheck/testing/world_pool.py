"""A pool of worlds: prefetched, reused, closed in the background.

    pool = WorldPool()
    world = pool.acquire(world_size=2, following={"world_size": 2})   # fresh ranks, prepared while the last test ran
    ...
    pool.release(world)                # does not wait
    pool.close()                       # waits until everything is gone

Making a world takes processor time whenever it is done, so a spare one is only made where the next test is known to use
it.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.harness import World, start_world
from ddpcheck.worlds import starting, validation

_EARLY = (  # prefixes of variables that are read when a process, a thread pool or a process group starts
    "ATEN_",
    "C10_",
    "CUDA_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
)
_LATE = ("timeout", "startup_timeout", "env", "watch")  # options that a world can take over afterwards
_PATIENCE = 1.0  # seconds for ranks to get their next process group; fresh ones take less
_CLOSING = 4  # worlds that may be on their way out at the same time

Kind = Hashable  # worlds of one kind can stand in for each other


def _kind(options: Mapping[str, Any]) -> Kind:
    """The kind of a world with these options: fixed from its start.

    Raises:
        UsageError: An option makes no sense.
    """
    asked = validation.WorldOptions(**options)
    own = asked.env or {}
    environment = {**starting.inherited_environment(), **own}
    early = frozenset(item for item in environment.items() if item[0].startswith(_EARLY))
    fixed = {field.name: getattr(asked, field.name) for field in fields(asked) if field.name not in _LATE}
    fixed["threads"] = asked.threads or validation.threads(asked.world_size)
    return repr(fixed), early, frozenset(name for name in own if name.startswith(_EARLY))


class WorldPool:
    """Owns every world that it hands out; one for each test process, not to be shared between threads.

    `options` are those of `WorldOptions`, as keywords. A world that was handed out may be closed by whoever has it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._spare: tuple[Kind, World] | None = None
        self._leased: dict[int, tuple[World, tuple[Hashable, Kind] | None]] = {}
        self._idle: dict[tuple[Hashable, Kind], list[World]] = {}  # shared worlds, by owner and kind
        self._closing: deque[World] = deque()

    def acquire(self, *, following: Mapping[str, Any] | None = None, **options: Any) -> World:
        """Return a world that nobody has used: one that was prepared where it fits, else a new one.

        `following` are the options of the next lease, which is prepared; `None`: nothing is.

        Raises:
            UsageError: When an option makes no sense.
        """
        self._enter()
        kind = _kind(options)
        world = self._prepared(kind, options) or start_world(**options)
        self._leased[id(world)] = (world, None)
        self._prepare(following)
        return world

    def lease_shared(self, owner: Hashable, **options: Any) -> World:
        """Return the same ranks for every lease of an owner with the same options, each with a new process group.

        Where one failed, or was given back broken, or does not get its next process group in time, the ranks are fresh
        ones. The owner is a test module, say; `end` ends its ranks.

        Raises:
            UsageError: When an option makes no sense.
        """
        self._enter()
        kind = _kind(options)
        key = (owner, kind)
        idle = self._idle.setdefault(key, [])
        world = None
        while idle and world is None:
            one = idle.pop()
            world = self._updated(one, one.wait_ready(_PATIENCE), options)
        world = world or self._prepared(kind, options) or start_world(**options)
        self._leased[id(world)] = (world, key)
        return world

    def release(self, world: World, *, broken: bool = False) -> None:
        """Take a world back, without waiting for a process; where its user has failed, nobody gets these ranks again.

        Ranks of `acquire` end in the background; those of `lease_shared` get their next process group there.
        """
        self._enter()
        _, key = self._leased.pop(id(world), (world, None))
        if key is None or broken or key not in self._idle:
            self._begin_close(world)
            return
        try:
            world.reset_process_group()
        except DDPCheckError:  # it has failed, is closed, or still at work
            self._begin_close(world)
        else:
            self._idle[key].append(world)

    def end(self, owner: Hashable) -> None:
        """End the worlds that are shared under an owner; those that are in use end when they are given back."""
        self._enter()
        for key in [key for key in self._idle if key[0] == owner]:
            for world in self._idle.pop(key):
                self._begin_close(world)

    def close(self) -> None:
        """End every world, also those that are in use, and wait until all is gone."""
        self._enter()
        self._prepare(None)
        held = [world for world, _ in self._leased.values()]
        for world in [*held, *(world for idle in self._idle.values() for world in idle)]:
            self._begin_close(world)
        self._leased.clear()
        self._idle.clear()
        while self._closing:
            self._closing.popleft().close()

    # --- A spare -----------------------------------------------------------------------------------------------

    def _prepared(self, kind: Kind, options: Mapping[str, Any]) -> World | None:
        """The spare if it is of this kind, made a world of now."""
        if self._spare is None or self._spare[0] != kind:
            return None
        (_, world), self._spare = self._spare, None
        return self._updated(world, world.usable, options)

    def _updated(self, world: World, usable: bool, options: Mapping[str, Any]) -> World | None:
        if usable:
            try:
                world.update_options(**{name: options[name] for name in _LATE if name in options})
                return world
            except DDPCheckError:
                pass
        self._begin_close(world)
        return None

    def _prepare(self, options: Mapping[str, Any] | None) -> None:
        """Have the world with these options as the spare one, and no other."""
        kind = None
        with contextlib.suppress(UsageError):  # the test that needs it will be told
            kind = None if options is None else _kind(options)
        if self._spare is not None and self._spare[0] != kind:
            self._begin_close(self._spare[1])
            self._spare = None
        if options is not None and kind is not None and self._spare is None:
            with contextlib.suppress(DDPCheckError):
                self._spare = kind, start_world(**options, ahead=True)

    # --- Ending ------------------------------------------------------------------------------------------------

    def _begin_close(self, world: World) -> None:
        world.begin_close()
        if not world.closed:
            self._closing.append(world)

    def _enter(self) -> None:
        """Do what is due whenever we are called: clear away what has ended."""
        if self._pid != os.getpid():  # a fork of the process that all of these belong to
            WorldPool.__init__(self)
        for _ in range(len(self._closing)):
            world = self._closing.popleft()
            if world.gone or len(self._closing) >= _CLOSING:
                world.close()
            else:
                self._closing.append(world)
