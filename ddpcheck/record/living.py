"""Objects that somebody else holds, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

_Thing = TypeVar("_Thing")


class Living(Generic[_Thing]):
    """Weak references to a few objects; it may change while it is iterated over.

    Watches are asked for a dozen times in each step of a loop, for which a `WeakSet` is slow.
    """

    def __init__(self) -> None:
        self._refs: tuple[ref[_Thing], ...] = ()

    def add(self, thing: _Thing) -> None:
        """Add an object, as long as it lives."""
        self._refs = (*self._refs, ref(thing, self._gone))

    def discard(self, thing: _Thing) -> None:
        """Leave an object out, if it is there."""
        self._refs = tuple(one for one in self._refs if one() is not thing)

    def _gone(self, dead: ref[_Thing]) -> None:
        self._refs = tuple(one for one in self._refs if one is not dead)

    def __iter__(self) -> Iterator[_Thing]:
        return iter([thing for one in self._refs if (thing := one()) is not None])

    def __bool__(self) -> bool:
        return bool(self._refs)
