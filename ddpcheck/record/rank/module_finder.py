"""Changes modules right after the program has imported them, before it can take a reference to what is in them.

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
    """Call `follow` with each module of these names: now, or as soon as the program imports it."""
    for name in names:
        if name in sys.modules:
            guarded(follow)(sys.modules[name])
        else:
            _awaited[name] = follow
    if _awaited and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def guarded(function: Callable[..., object]) -> Callable[..., None]:
    """A function of ours that a program comes to: an error of it is noted in the folder of the run, and passed to none.

    It may well be an ImportError: a program may refuse modules that it does not know.
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
    """Finds the modules that are awaited as Python would; a loader goes on to change them."""

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
    """Loads a module, then puts the real loader back, which `inspect` and others ask for the source."""

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
