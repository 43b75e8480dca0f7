"""Start to watch a process as a rank once it joins a process group.

Neither torch nor the rest of ddpcheck is imported before the script does so: a script sets variables such as
CUDA_VISIBLE_DEVICES first, and workers of a data loader or a compiler, which inherit the environment, join no group.

This module is light: it never imports torch.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpcheck.record.rank import started_processes
from ddpcheck.record.rank.environment import ParityOptions, RunOptions, errors_to_folder, options_of_run, when_imported

_GROUPS_MODULE = "torch.distributed.distributed_c10d"
_RECORDED_MODULES = (  # constructions and seeds are recorded, also before a process group exists
    *("torch.random", "torch.utils.data.dataset", "torch.utils.data.sampler", "torch.utils.data.distributed"),
    *("torch.utils.data.dataloader", "numpy.random"),
)
_COLLECTIVES = (  # often imported by name
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "barrier"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "all_gather_object"),
    *("gather_object", "broadcast_object_list", "scatter_object_list", "all_gather_single", "reduce_scatter_single"),
)
_REPLACED = (*_COLLECTIVES, "destroy_process_group")

replacements: dict[str, Callable[..., Any]] = {}
"""Replacements of `torch.distributed` functions, by name; empty until this process is watched."""

stand_ins: list[Callable[..., Any]] = []  # functions that replace torch's, under the same name


def wait_for_process_group() -> None:
    """Start `rank_watch` once this process joins a process group."""
    started_processes.mark_first_process()
    when_imported((_GROUPS_MODULE,), _patch_process_groups)
    when_imported(_RECORDED_MODULES, _record_constructions)
    record_parity()


def record_parity() -> None:
    """Start parity recording once torch is imported, if the run is compared."""
    if (options := options_of_run(os.environ)) is not None and (parity := options.parity) is not None:
        folder = options.folder
        when_imported(("torch",), lambda _module: _record_parity(parity, folder))


def _record_parity(options: ParityOptions, folder: str) -> None:
    from ddpcheck.record.parity import parity_recorder  # import only if needed

    parity_recorder.start(options, folder)
    if options.replays and started_processes.is_first_process():
        from ddpcheck.record.rank import rank_watch

        rank_watch.begin_single_process(RunOptions(folder, 0, options))


def _patch_process_groups(module: ModuleType) -> None:
    started_processes.follow_ends()
    # Before `torch.distributed` copies the names, and before user code can take a reference.
    functions = vars(module)
    functions["init_process_group"] = _patched_init(functions["init_process_group"])
    for name in _REPLACED:
        if name in functions:
            functions[name] = _replaceable(name, functions[name])


def _record_constructions(module: ModuleType) -> None:
    from ddpcheck.record.data import constructions  # import only if needed

    constructions.follow(module)


def _replaceable(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def collective(*arguments: Any, **named: Any) -> Any:
        return replacements.get(name, original)(*arguments, **named)

    stand_ins.append(collective)
    return collective


def _begin_watch() -> None:
    from ddpcheck.record.rank import rank_watch

    rank_watch.begin(replacements, stand_ins)  # imports only modules that DDP's constructor imports, too


def _patched_init(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        errors_to_folder(started_processes.leave_agent_store)(arguments, named)
        with started_processes.joining_file(arguments, named):
            original(*arguments, **named)
        collects = gc.isenabled()
        gc.disable()  # a collection over all torch objects would add half of the import time
        try:
            errors_to_folder(_begin_watch)()
        finally:
            if collects:
                gc.enable()

    stand_ins.append(init_process_group)
    return init_process_group
