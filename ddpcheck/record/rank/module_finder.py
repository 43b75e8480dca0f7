"""Patch modules right after their import, before the program can take references.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ddpcheck.record.rank.environment import note_unwatched

_Follow = Callable[[ModuleType], object]


def when_imported(names: Iterable[str], follow: _Follow) -> None:
    """Call `follow` with each named module, now or right after its import."""
    for name in names:
        if name in sys.modules:
            guarded(follow)(sys.modules[name])
        else:
            _awaited[name] = follow
    if _awaited and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def guarded(function: Callable[..., object]) -> Callable[..., None]:
    """Wrap a function: its errors go to the run folder and never propagate.

    Errors include ImportError: a program may block modules unknown to it.
    """

    def call(*arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            with contextlib.suppress(Exception):
                note_unwatched(error)

    return call


_awaited: dict[str, _Follow] = {}


class _Finder(MetaPathFinder):
    """Finder of awaited modules, with a loader that calls `follow`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        follow = _awaited.pop(fullname, None)
        if follow is None:
            return None
        if not _awaited:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThatFollows(spec.loader, follow)
        return spec


_finder = _Finder()


class _LoaderThatFollows(Loader):
    """Loader that calls `follow`, then restores the real loader (for `inspect`)."""

    def __init__(self, loader: Loader, follow: _Follow) -> None:
        self._loader = loader
        self._follow = follow

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        guarded(self._follow)(module)
