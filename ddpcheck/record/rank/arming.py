"""Waits in a process for a process group: who joins one is a rank, whatever has started it.

Neither torch nor the rest of ddpcheck is imported before the script does so: a script sets variables such as
CUDA_VISIBLE_DEVICES first, and workers of a data loader or a compiler, which inherit the environment, join no group.

This module is light: it never imports torch.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ddpcheck.record.rank import started_processes

_WITH_GROUPS = "torch.distributed.distributed_c10d"
_WITH_LINES = (  # whose constructions and seeds are noted, which come before there is a process group too
    *("torch.random", "torch.utils.data.dataset", "torch.utils.data.sampler", "torch.utils.data.distributed"),
    *("torch.utils.data.dataloader", "numpy.random"),
)
_COLLECTIVES = (  # those that programs import by name
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "barrier"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "all_gather_object"),
    *("gather_object", "broadcast_object_list", "scatter_object_list", "all_gather_single", "reduce_scatter_single"),
)
_REPLACED = (*_COLLECTIVES, "destroy_process_group")

replacements: dict[str, Callable[..., Any]] = {}
"""What is called in the place of a collective of torch, by its name; empty until this process is watched."""

stand_ins: list[Callable[..., Any]] = []
"""The functions that stand in the place of torch's collectives."""


def wait_for_process_group() -> None:
    """Have `rank_watch` begin once this process has joined a process group; that is seen as soon as torch is there."""
    started_processes.mark_first_process()
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch's module of process groups, and a few others, as Python would; a loader goes on to change them."""

    def __init__(self) -> None:
        self._awaited = {_WITH_GROUPS, *_WITH_LINES}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        self._awaited.discard(fullname)
        if not self._awaited:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThatArms(spec.loader)
        return spec


class _LoaderThatArms(Loader):
    """Loads a module, then puts the real loader back, which `inspect` and others ask for the source."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if module.__name__ != _WITH_GROUPS:
            from ddpcheck.record.data import constructions  # not in each Python process

            constructions.follow(module)
            return
        started_processes.follow_ends()
        # Before `torch.distributed` copies the names, and before user code can take a reference.
        functions = vars(module)
        functions["init_process_group"] = _announcing(functions["init_process_group"])
        for name in _REPLACED:
            if name in functions:
                functions[name] = _replaceable(name, functions[name])


def _replaceable(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*arguments: Any, **named: Any) -> Any:
        return replacements.get(name, original)(*arguments, **named)

    stand_ins.append(collective)
    return collective


def _announcing(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        started_processes.leave_agent_store(arguments, named)
        original(*arguments, **named)
        collects = gc.isenabled()
        gc.disable()  # to go through all objects of torch would take half as long again as the import
        try:
            from ddpcheck.record.rank import rank_watch
        finally:
            if collects:
                gc.enable()
        rank_watch.begin(replacements, stand_ins)

    return init_process_group
