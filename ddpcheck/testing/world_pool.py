"""A pool of worlds: prefetched, reused, closed in the background.

    pool = WorldPool()
    world = pool.acquire(world_size=2)   # fresh ranks, prepared while the last test ran
    ...
    pool.release(world)              # does not wait
    pool.close()                       # waits until everything is gone

Making a world takes processor time whenever it is done, so a spare one is only made where it will be used: `WorldPool`
notes which kind of world followed which, and prepares what followed last time.

This module is light: it never imports torch.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.errors import DdpcheckError, UsageError
from ddpcheck.harness import World
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
_LATE = ("timeout", "startup_timeout", "env", "watch", "ahead")  # options that a world can take over afterwards
_SPARES = 2  # at most
_MEMORY = 4  # leases after which a spare that nobody has asked for goes
_GUESSES = 2  # spares in vain, after which no spare is made for a kind of world that has not been seen to recur
_PATIENCE = 1.0  # seconds for ranks to get their next process group; fresh ones take less
_CLOSING = 4  # worlds that may be on their way out at the same time

Kind = Hashable
"""Worlds of one kind can stand in for each other."""

_SIGNATURE = inspect.signature(World)


def _kind(options: Mapping[str, Any]) -> Kind | None:
    """The kind of a world with these options: fixed from its start; `None` where the options make no sense."""
    try:
        bound = _SIGNATURE.bind(**options)
        bound.apply_defaults()
        asked = bound.arguments
        own = asked["env"] or {}
        environment = {**starting.inherited_environment(), **own}
        early = frozenset(item for item in environment.items() if item[0].startswith(_EARLY))
        fixed = {name: value for name, value in asked.items() if name not in _LATE}
        fixed["threads"] = asked["threads"] or validation.threads(asked["world_size"])
        fixed["preload"] = tuple(asked["preload"])
        exact = frozenset((name, type(value), value) for name, value in fixed.items())  # 2.0 is not 2, nor True 1
        kind = (exact, early, frozenset(name for name in own if name.startswith(_EARLY)))
        hash(kind)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    return kind


@dataclass(eq=False)
class _Spare:
    kind: Kind
    world: World
    guess: bool
    age: int = 0  # in leases


class WorldPool:
    """Owns every world that it hands out; one for each test process, not to be shared between threads.

    `options` are those of `World` everywhere, as keywords. A world that was handed out may be closed by whoever has it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._spares: list[_Spare] = []
        self._leased: dict[int, tuple[World, tuple[Hashable, Kind] | None]] = {}
        self._idle: dict[tuple[Hashable, Kind], list[World]] = {}  # shared worlds, by owner and kind
        self._closing: deque[World] = deque()
        self._followed: dict[Kind, tuple[Kind, Mapping[str, Any]]] = {}  # what was asked for after a kind
        self._last: Kind | None = None
        self._in_vain = 0

    def acquire(self, *, last: bool = False, **options: Any) -> World:
        """Return a world that nobody has used: one that was prepared where it fits, else a new one.

        `last` says that no other lease will follow, so that nothing needs to be prepared.

        Raises:
            UsageError: When an option makes no sense.
        """
        self._enter()
        kind = _kind(options)
        if kind is None:
            return World(**options)  # which says what is wrong
        world = self._prepared(kind, options) or World(**options)
        self._leased[id(world)] = (world, None)
        try:
            self._prefetch(kind, options, last)
        except DdpcheckError:
            pass  # the test that needs it will be told
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
        if kind is None:
            return World(**options)
        key = (owner, kind)
        idle = self._idle.setdefault(key, [])
        world = None
        while idle and world is None:
            one = idle.pop()
            world = self._updated(one, one.wait_ready(_PATIENCE), options)
        world = world or self._prepared(kind, options) or World(**options)
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
        except DdpcheckError:  # it has failed, is closed, or still at work
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
        held = [world for world, _ in self._leased.values()] + [spare.world for spare in self._spares]
        for world in [*held, *(world for idle in self._idle.values() for world in idle)]:
            self._begin_close(world)
        self._leased.clear()
        self._spares.clear()
        self._idle.clear()
        while self._closing:
            self._closing.popleft().close()

    # --- Spares ------------------------------------------------------------------------------------------------

    def _prepared(self, kind: Kind, options: Mapping[str, Any]) -> World | None:
        """A spare of this kind, where there is one, made a world of now."""
        for spare in self._spares:
            if spare.kind == kind:
                self._spares.remove(spare)
                if spare.guess:
                    self._in_vain = 0
                return self._updated(spare.world, spare.world.usable, options)
        return None

    def _updated(self, world: World, usable: bool, options: Mapping[str, Any]) -> World | None:
        if usable:
            try:
                world.update_options(**{name: options[name] for name in _LATE if name in options and name != "ahead"})
                return world
            except UsageError:
                self._begin_close(world)
                raise
            except DdpcheckError:
                pass
        self._begin_close(world)
        return None

    def _prefetch(self, kind: Kind, options: Mapping[str, Any], last: bool) -> None:
        """Prepare the world that is likely to be asked for next, and let go of those that are not."""
        if self._last is not None:
            self._followed[self._last] = (kind, dict(options))
        self._last = kind
        for spare in self._spares:
            spare.age += 1
        guess = kind not in self._followed
        next_kind, next_options = self._followed.get(kind, (kind, options))
        wanted = not last and not (guess and self._in_vain >= _GUESSES)
        for spare in list(self._spares):
            if spare.kind == next_kind:
                wanted = False
                spare.age = 0
            elif spare.age > _MEMORY or last:
                self._drop(spare)
        if wanted:
            while len(self._spares) >= _SPARES:
                self._drop(max(self._spares, key=lambda spare: spare.age))
            self._spares.append(_Spare(next_kind, World(**{**next_options, "watch": None, "ahead": True}), guess))

    def _drop(self, spare: _Spare) -> None:
        self._spares.remove(spare)
        self._in_vain += spare.guess
        self._begin_close(spare.world)

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
